"""Continuous batching: what runs in the next step, and who waits.

A step takes the decodes of all running sequences first, then chunks of prefills under what is left
of the token budget, so a long prompt costs the others a bounded delay each step and never their
turn. A sequence takes the blocks of all tokens it has when it is admitted, and one more block
whenever it grows into it; when none is free, the youngest running sequence gives its own back and
is recomputed later from its prompt and what it has generated.
"""

import heapq

from polyloom.adapters.residency import ResidencyState
from polyloom.kvcache.errors import OutOfBlocksError
from polyloom.routing.request import GenerationRequest
from polyloom.routing.scheduler.batch import (
    FailedSequence,
    ScheduledSequence,
    StepPlan,
    adapter_order,
)
from polyloom.routing.scheduler.config import SchedulerConfig
from polyloom.routing.scheduler.errors import DuplicateSequenceError, NeverFitsError
from polyloom.routing.scheduler.ports import AdapterPins, SequenceBlocks
from polyloom.routing.scheduler.sequence import Sequence, SequenceStatus
from polyloom.routing.scheduler.waiting import WaitingQueue


class Batcher:
    """Owns every sequence of the engine from `add` to `finish`.

    All calls come from the step loop's thread. Times are monotonic seconds, deadlines unix seconds.
    """

    def __init__(
        self, config: SchedulerConfig, blocks: SequenceBlocks, adapters: AdapterPins
    ) -> None:
        if blocks.blocks_for(config.max_model_len) > blocks.num_blocks:
            raise ValueError(
                f"a sequence of max_model_len {config.max_model_len} tokens does not fit in "
                f"{blocks.num_blocks} blocks"
            )
        self.config = config
        self.preemptions_total = 0
        self._blocks = blocks
        self._adapters = adapters
        self._sequences: dict[str, Sequence] = {}
        self._waiting = WaitingQueue(config.queue_limit)
        self._running: list[Sequence] = []
        self._deadlines: list[tuple[float, str]] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def sequence_ids(self) -> tuple[str, ...]:
        return tuple(self._sequences)

    def get(self, sequence_id: str) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    def add(self, request: GenerationRequest, now: float) -> Sequence:
        """Queue a request.

        Raises:
            NeverFitsError: it could not run even alone.
            QueueFullError: too many wait.
            DuplicateSequenceError: the id is in use.
        """
        if request.sequence_id in self._sequences:
            raise DuplicateSequenceError(request.sequence_id)
        prompt_tokens, max_tokens = len(request.prompt), request.sampling.max_tokens
        if prompt_tokens + max_tokens > self.config.max_model_len:
            raise NeverFitsError(prompt_tokens, max_tokens, self.config.max_model_len)
        sequence = Sequence(request, now)
        self._waiting.append(sequence)
        self._sequences[sequence.sequence_id] = sequence
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.sequence_id))
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is; its blocks and its pin are free on return."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is not SequenceStatus.FINISHED:
            self._waiting.remove(sequence)
        if sequence.sequence_id in self._blocks:
            self._blocks.free(sequence.sequence_id)
        self._unpin(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._sequences.pop(sequence.sequence_id, None)

    def overdue(self, unix_time: float) -> list[Sequence]:
        """Sequences whose deadline has passed; the caller finishes them."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= unix_time:
            _, sequence_id = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                late.append(sequence)
        return late

    def plan(self, now: float) -> StepPlan:
        """Choose the next step's tokens; their blocks are reserved on return."""
        preempted_before = self.preemptions_total
        items = self._decodes()
        budget = self.config.token_budget - len(items)
        items += self._continued_prefills(budget)
        failed: list[FailedSequence] = []
        if self.preemptions_total == preempted_before:  # else it would take the blocks just freed
            budget = self.config.token_budget - sum(item.num_tokens for item in items)
            admitted, failed = self._admissions(budget, now)
            items += admitted
        items.sort(key=adapter_order)
        return StepPlan(tuple(items), tuple(failed))

    def commit(self, plan: StepPlan) -> None:
        """The plan's tokens are in the cache."""
        for item in plan.scheduled:
            sequence = item.sequence
            sequence.computed += item.num_tokens
            self._blocks.commit(sequence.sequence_id, sequence.tokens, sequence.computed)

    def _decodes(self) -> list[ScheduledSequence]:
        """One token of every decoding sequence, oldest first, preempting from the young end."""
        items: list[ScheduledSequence] = []
        for sequence in tuple(self._running):
            if not sequence.decoding:
                continue
            if self._grow(sequence):
                items.append(ScheduledSequence(sequence, sequence.computed, 1, True))
        return items

    def _grow(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a running sequence; False if it was preempted itself."""
        while not self._reserve(sequence):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _reserve(self, sequence: Sequence) -> bool:
        """Blocks for all tokens the sequence has; False, with nothing taken, if too few are free."""
        try:
            self._blocks.reserve(sequence.sequence_id, len(sequence.tokens))
        except OutOfBlocksError:
            return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue's front without blocks; the pin stays, so its pages do too."""
        self._running.remove(sequence)
        self._blocks.free(sequence.sequence_id)
        sequence.forget_cache()
        sequence.status = SequenceStatus.WAITING
        self._waiting.put_back(sequence)
        self.preemptions_total += 1

    def _continued_prefills(self, budget: int) -> list[ScheduledSequence]:
        """Next chunks of sequences that are admitted but not through their prompt."""
        items: list[ScheduledSequence] = []
        for sequence in self._running:
            if budget == 0:
                break
            if not sequence.decoding:
                items.append(_chunk(sequence, budget))
                budget -= items[-1].num_tokens
        return items

    def _admissions(
        self, budget: int, now: float
    ) -> tuple[list[ScheduledSequence], list[FailedSequence]]:
        """First chunks of waiting sequences while budget, room and blocks last.

        One whose adapter is not there yet is passed over; one that finds no blocks ends the round,
        or large ones would starve. Loads are started ahead for the front of the queue.
        """
        items: list[ScheduledSequence] = []
        failed: list[FailedSequence] = []
        pins = _WaitingPins(self.config, now)
        for place, sequence in enumerate(self._waiting.candidates()):
            room = budget > 0 and len(self._running) < self.config.max_running
            if not room and place >= self.config.max_running:
                break
            state = self._adapter_state(sequence, pins, now)
            if state is ResidencyState.FAILED:
                failed.append(self._fail(sequence))
            elif state is ResidencyState.RESIDENT and room:
                if not self._admit(sequence, now):
                    budget = 0
                    continue
                items.append(_chunk(sequence, budget))
                budget -= items[-1].num_tokens
        return items, failed

    def _adapter_state(
        self, sequence: Sequence, pins: "_WaitingPins", now: float
    ) -> ResidencyState:
        """Pin the sequence's revision if that is still to be done; may it run now?"""
        source = sequence.request.adapter
        if source is None:
            return ResidencyState.RESIDENT
        if sequence.pinned:
            state = self._adapters.state(source.digest)
        elif not pins.may_pin:
            return ResidencyState.NO_ROOM
        else:
            state = self._adapters.pin(source)
            sequence.pinned = state is not ResidencyState.FAILED
        pins.passed(sequence, state)
        if state is not ResidencyState.RESIDENT and sequence.load_started is None:
            sequence.load_started = now
            sequence.status = SequenceStatus.LOADING
        elif state is ResidencyState.RESIDENT and sequence.status is SequenceStatus.LOADING:
            sequence.adapter_load = now - (sequence.load_started or now)
            sequence.status = SequenceStatus.WAITING
        return state

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Give it blocks; those of its prefix that are cached need not run."""
        try:
            sequence.computed = self._blocks.admit(
                sequence.sequence_id, sequence.tokens, sequence.reusable
            )
        except OutOfBlocksError:
            return False
        self._waiting.remove(sequence)
        self._insert_running(sequence)
        sequence.status = SequenceStatus.RUNNING
        if sequence.admitted is None:
            sequence.admitted = now
        return True

    def _insert_running(self, sequence: Sequence) -> None:
        """Keep `_running` oldest first: the last is the one to preempt."""
        place = len(self._running)
        while place > 0 and self._running[place - 1].arrival > sequence.arrival:
            place -= 1
        self._running.insert(place, sequence)

    def _fail(self, sequence: Sequence) -> FailedSequence:
        digest = sequence.adapter_digest
        assert digest is not None  # only sequences with an adapter have a pin that can fail
        error = self._adapters.failure(digest)
        self.finish(sequence)
        return FailedSequence(sequence, error)

    def _unpin(self, sequence: Sequence) -> None:
        digest = sequence.adapter_digest
        if sequence.pinned and digest is not None:
            self._adapters.unpin(digest)
            sequence.pinned = False


class _WaitingPins:
    """May a waiting sequence pin its adapter? Asked in queue order, once a step.

    As many waiting sequences hold pins as may run, so pins that nobody can use soon do not fill
    the adapters' memory. While one finds no room for its adapter, younger ones may overtake it
    until its patience ends; then they pin nothing, pins drain, and it gets the pages.
    """

    def __init__(self, config: SchedulerConfig, now: float) -> None:
        self.may_pin = True
        self._left = config.max_running
        self._patience = config.adapter_patience
        self._now = now

    def passed(self, sequence: Sequence, state: ResidencyState) -> None:
        """Count a sequence that holds a pin, in `state`."""
        self._left -= sequence.pinned
        if self._left <= 0:
            self.may_pin = False
        if state is not ResidencyState.NO_ROOM:
            return
        if sequence.no_room_since is None:
            sequence.no_room_since = self._now
        if self._now - sequence.no_room_since >= self._patience:
            self.may_pin = False


def _chunk(sequence: Sequence, budget: int) -> ScheduledSequence:
    """As much of the sequence's pending tokens as the budget allows."""
    num_tokens = min(sequence.pending, budget)
    completes = num_tokens == sequence.pending
    return ScheduledSequence(sequence, sequence.computed, num_tokens, completes)
