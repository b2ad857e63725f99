"""Adapters of waiting sequences: loaded ahead in the queue's order, and not without bound."""

import math
from collections.abc import Iterable

from polyloom.adapters.residency import ResidencyState
from polyloom.routing.scheduler.config import SchedulerConfig
from polyloom.routing.scheduler.ports import AdapterPins
from polyloom.routing.scheduler.sequence import Sequence, SequenceStatus


class WaitingPins:
    """May a waiting sequence's adapter be pinned, and may the sequence run?

    As many waiting sequences hold pins as may run, those that are due first, so pins that nobody
    can use soon do not fill the adapters' memory. While one finds no room for its adapter, younger
    ones may overtake it until its patience ends; then they pin nothing, pins drain, and it gets
    the pages.

    One step is `begin`, `state` for each sequence in the queue's order, `end`.
    """

    def __init__(self, config: SchedulerConfig, adapters: AdapterPins) -> None:
        self._limit = config.max_running
        self._patience = config.adapter_patience
        self._adapters = adapters
        self._now = 0.0
        self._seen: set[str] = set()
        self._without_room: dict[str, Sequence] = {}
        self._youngest_allowed = math.inf

    def begin(self, now: float) -> None:
        """A step begins at `now`."""
        self._now = now
        self._seen.clear()
        self._youngest_allowed = min(
            (s.arrival for s in self._without_room.values() if self._out_of_patience(s)),
            default=math.inf,
        )

    def state(self, sequence: Sequence) -> ResidencyState:
        """State of the next sequence's adapter, pinned now if that is due; RESIDENT: it may run."""
        source = sequence.request.adapter
        if source is None:
            return ResidencyState.RESIDENT
        if sequence.pinned:
            state = self._adapters.state(source.digest)
        elif len(self._seen) >= self._limit or sequence.arrival > self._youngest_allowed:
            return ResidencyState.NO_ROOM
        else:
            state = self._adapters.pin(source)
            sequence.pinned = state is not ResidencyState.FAILED
        self._note(sequence, state)
        return state

    def end(self, waiting: Iterable[Sequence]) -> None:
        """Return the pins of sequences that others are now due before, the youngest first.

        One without room keeps its pin: it holds no pages, only its place among those to get some.
        """
        pinned = [sequence for sequence in waiting if sequence.pinned]
        surplus = len(pinned) - self._limit
        if surplus <= 0:
            return
        late = [s for s in pinned if s.sequence_id not in self._seen and s.no_room_since is None]
        late.sort(key=lambda sequence: sequence.arrival, reverse=True)
        for sequence in late[:surplus]:
            self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Return the sequence's pin, if it has one."""
        self._without_room.pop(sequence.sequence_id, None)
        digest = sequence.adapter_digest
        if sequence.pinned and digest is not None:
            self._adapters.unpin(digest)
            sequence.pinned = False

    def _note(self, sequence: Sequence, state: ResidencyState) -> None:
        if sequence.pinned:
            self._seen.add(sequence.sequence_id)
        if state is ResidencyState.NO_ROOM:
            if sequence.no_room_since is None:
                sequence.no_room_since = self._now
                self._without_room[sequence.sequence_id] = sequence
        else:
            sequence.no_room_since = None
            self._without_room.pop(sequence.sequence_id, None)
        if state is ResidencyState.RESIDENT:
            if sequence.status is SequenceStatus.LOADING:
                sequence.adapter_load = self._now - (sequence.load_started or self._now)
                sequence.status = SequenceStatus.WAITING
        elif sequence.load_started is None:
            sequence.load_started = self._now
            sequence.status = SequenceStatus.LOADING

    def _out_of_patience(self, sequence: Sequence) -> bool:
        since, digest = sequence.no_room_since, sequence.adapter_digest
        if since is None or digest is None or self._now - since < self._patience:
            return False
        return self._adapters.state(digest) is ResidencyState.NO_ROOM
