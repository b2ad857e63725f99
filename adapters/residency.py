"""Which revisions are on the device: loads off the step loop, pins, eviction, retirement.

A revision's way: queued → reading → (parked, while pinned pages leave no room) → packing → resident.
All operations on a revision go through its one entry, on the step loop's thread; worker threads only
read files and fill pages that no batch refers to yet. So loads are shared by digest, a revision
retired while it loads is dropped when the load ends, and nothing needs a lock.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

import torch

from polyloom.adapters.errors import AdapterError, AdapterTooLargeError, CorruptAdapterError
from polyloom.adapters.loader import Loader
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.placement import Allocation, PageNeed
from polyloom.adapters.segments import LoraBatch, lora_batch
from polyloom.adapters.source import AdapterSource
from polyloom.adapters.weights import AdapterWeights

READ_WIDTH = 2
"""Revisions being read or packed at a time: each holds its fp32 tensors on the host meanwhile."""

RETRY_SECONDS = 30.0
"""How long a revision that could not be read stays failed; one that is corrupt stays so."""


class ResidencyState(StrEnum):
    """What a sequence that wants a revision can expect.

    NO_ROOM: others' pins leave no room; asking again later helps.  FAILED: see `failure`.
    """

    RESIDENT = "resident"
    LOADING = "loading"
    NO_ROOM = "no_room"
    FAILED = "failed"


class _Phase(StrEnum):
    QUEUED = "queued"
    READING = "reading"
    PARKED = "parked"
    PACKING = "packing"
    RESIDENT = "resident"
    FAILED = "failed"


@dataclass(eq=False)
class _Entry:
    """One revision. `need` is known once it was read, `allocation` once it has its pages."""

    source: AdapterSource
    phase: _Phase = _Phase.QUEUED
    pins: int = 0
    retired: bool = False
    need: PageNeed | None = None
    allocation: Allocation | None = None
    reading: Future[AdapterWeights] | None = None
    packing: Future[None] | None = None
    load_started: float = 0.0
    requests: int = 0


@dataclass(frozen=True)
class _Failure:
    error: AdapterError
    retry_at: float | None


@dataclass
class ResidencyCounters:
    """Since the start. `load_seconds` sums queued-to-resident times."""

    loads: int = 0
    load_failures: int = 0
    evictions: int = 0
    load_seconds: float = 0.0


@dataclass(frozen=True)
class ResidentAdapter:
    """One entry of a snapshot. `requests` counts pins since the revision was last loaded."""

    digest: str
    state: str
    pinned_by: int
    pages: int
    num_bytes: int
    requests: int


class Residency:
    """Revisions by digest. Every method belongs to the step loop's thread."""

    def __init__(
        self,
        pages: AdapterPages,
        loader: Loader,
        clock: Callable[[], float] = time.monotonic,
        workers: Executor | None = None,
    ) -> None:
        """workers: where files are read and pages filled; `READ_WIDTH` threads by default."""
        self.counters = ResidencyCounters()
        self._pages = pages
        self._loader = loader
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._loading: dict[str, _Entry] = {}  # those of them that load, oldest first
        self._failures: dict[str, _Failure] = {}
        self._workers = workers or ThreadPoolExecutor(
            READ_WIDTH, thread_name_prefix="adapter-load", initializer=_single_threaded
        )

    # Pins

    def pin(self, source: AdapterSource) -> ResidencyState:
        """One pin for one sequence, starting a load where needed; FAILED takes no pin.

        A pinned revision stays, from its load on, until the pin is returned.
        """
        if self._failed(source.digest):
            return ResidencyState.FAILED
        entry = self._entries.get(source.digest)
        if entry is None:
            entry = _Entry(source, load_started=self._clock())
            self._entries[source.digest] = entry
            self._loading[source.digest] = entry
            self._start_reads()
        entry.pins += 1
        entry.requests += 1
        self._entries.move_to_end(source.digest)
        return _STATES[entry.phase]

    def state(self, digest: str) -> ResidencyState:
        """State of a pinned revision; after FAILED the pin must still be returned."""
        return _STATES[self._entries[digest].phase]

    def unpin(self, digest: str) -> None:
        """Return one pin."""
        entry = self._entries[digest]
        if entry.pins == 0:
            raise ValueError(f"{digest} is unpinned more often than pinned")
        entry.pins -= 1
        self._entries.move_to_end(digest)
        self._drop_if_unwanted(entry)

    def failure(self, digest: str) -> AdapterError:
        """Why the revision is FAILED."""
        return self._failures[digest].error

    def retire(self, digest: str) -> None:
        """Unload: at once, or when the last pin is returned, or when its load ends.

        Forgets a failure too: the same content pushed again gets a new try.
        """
        entry = self._entries.get(digest)
        if entry is None:
            self._failures.pop(digest, None)
            return
        entry.retired = True
        self._drop_if_unwanted(entry)

    # The step loop

    def poll(self) -> None:
        """Take in what the workers finished and start what can start. Call once a step."""
        if not self._loading:
            return
        for entry in list(self._loading.values()):
            if entry.reading is not None and entry.reading.done():
                self._finish_reading(entry, entry.reading)
            elif entry.packing is not None and entry.packing.done():
                self._finish_packing(entry, entry.packing)
        self._unpark()
        self._start_reads()

    def batch(self, segments: Sequence[tuple[str | None, int]]) -> LoraBatch:
        """The step's tokens as the gather ops need them.

        segments: (digest or None for the base alone, number of tokens), in token order; every
        digest is resident and pinned.
        """
        allocations = [
            (None if digest is None else self._resident(digest), tokens)
            for digest, tokens in segments
        ]
        return lora_batch(allocations)

    def snapshot(self) -> tuple[ResidentAdapter, ...]:
        """All revisions on the device or on their way there."""
        return tuple(self._describe(entry) for entry in self._entries.values())

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Revisions whose files are corrupt."""
        return tuple(
            digest
            for digest, failure in self._failures.items()
            if isinstance(failure.error, CorruptAdapterError)
        )

    def check(self) -> None:
        """AssertionError unless every page is accounted for; for idle checks and tests."""
        entries = self._entries.values()
        self._pages.check([e.allocation for e in entries if e.allocation is not None])
        for entry in entries:
            assert entry.pins >= 0
            loading = entry.phase not in (_Phase.RESIDENT, _Phase.FAILED)
            assert loading == (entry.source.digest in self._loading)
            if entry.phase in (_Phase.RESIDENT, _Phase.PACKING):
                assert entry.allocation is not None
            if entry.phase is _Phase.FAILED:
                assert entry.allocation is None and entry.pins > 0

    def close(self) -> None:
        """Stop the workers; loads that have not begun are dropped."""
        self._workers.shutdown(wait=True, cancel_futures=True)

    # Loading

    def _start_reads(self) -> None:
        busy = sum(e.reading is not None or e.packing is not None for e in self._loading.values())
        for entry in self._loading.values():
            if busy == READ_WIDTH:
                return
            if entry.phase is _Phase.QUEUED:
                entry.phase = _Phase.READING
                entry.reading = self._workers.submit(self._loader.load, entry.source)
                busy += 1

    def _finish_reading(self, entry: _Entry, reading: "Future[AdapterWeights]") -> None:
        entry.reading = None
        if entry.retired and entry.pins == 0:
            self._drop(entry)
            return
        error = reading.exception()
        if isinstance(error, Exception):  # any surprise of a loader costs its revision only
            self._fail(entry, error)
            return
        weights = reading.result()
        try:
            entry.need = self._pages.need(weights)
        except AdapterTooLargeError as too_large:
            self._fail(entry, too_large)
            return
        entry.allocation = entry.allocation or self._make_room(entry.need)
        if entry.allocation is None:
            entry.phase = _Phase.PARKED
            self._drop_if_unwanted(entry)
            return
        entry.phase = _Phase.PACKING
        entry.packing = self._workers.submit(self._pages.write, entry.allocation, weights)

    def _finish_packing(self, entry: _Entry, packing: "Future[None]") -> None:
        entry.packing = None
        error = packing.exception()
        if isinstance(error, Exception):
            self._fail(entry, error)
            return
        entry.phase = _Phase.RESIDENT
        del self._loading[entry.source.digest]
        self.counters.loads += 1
        self.counters.load_seconds += self._clock() - entry.load_started
        self._drop_if_unwanted(entry)

    def _unpark(self) -> None:
        """Give parked revisions their pages, oldest request first; they are read once more.

        Keeping their tensors instead would hold host memory for as many as wait.
        """
        for entry in self._loading.values():
            if entry.phase is _Phase.PARKED and entry.need is not None:
                entry.allocation = self._make_room(entry.need)
                if entry.allocation is not None:
                    entry.phase = _Phase.QUEUED

    def _make_room(self, need: PageNeed) -> Allocation | None:
        """Allocate, evicting the least recently used revisions if that can make it fit."""
        evictable = [
            e for e in self._entries.values() if e.phase is _Phase.RESIDENT and e.pins == 0
        ]
        held = sum(e.need.num_bytes for e in evictable if e.need is not None)
        fits = need.num_bytes <= self._pages.free_bytes + held
        if not fits or self._pages.free_slots + len(evictable) == 0:
            return None
        while (allocation := self._pages.allocate(need)) is None:
            self._drop(evictable.pop(0))
            self.counters.evictions += 1
        return allocation

    def _fail(self, entry: _Entry, error: Exception) -> None:
        """Record why; sequences that wait see FAILED, and nobody loads it again meanwhile."""
        if isinstance(error, AdapterError):
            failure = _Failure(error, None)
        else:
            wrapped = AdapterError(f"{entry.source.digest}: {type(error).__name__}: {error}")
            failure = _Failure(wrapped, self._clock() + RETRY_SECONDS)
        self.counters.load_failures += 1
        self._free(entry)
        entry.phase = _Phase.FAILED
        del self._loading[entry.source.digest]
        self._failures[entry.source.digest] = failure
        self._drop_if_unwanted(entry)

    def _failed(self, digest: str) -> bool:
        failure = self._failures.get(digest)
        if failure is None:
            return False
        if failure.retry_at is None or self._clock() < failure.retry_at:
            return True
        if digest in self._entries:  # its waiting sequences have not seen the failure yet
            return True
        del self._failures[digest]
        return False

    # Entries

    def _drop_if_unwanted(self, entry: _Entry) -> None:
        """Forget an entry that nobody pins and that is not worth keeping for later."""
        if entry.pins or entry.reading is not None or entry.packing is not None:
            return
        if entry.retired or entry.phase is not _Phase.RESIDENT:
            self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        digest = entry.source.digest
        self._free(entry)
        del self._entries[digest]
        self._loading.pop(digest, None)
        if entry.retired:
            self._failures.pop(digest, None)

    def _free(self, entry: _Entry) -> None:
        if entry.allocation is not None:
            self._pages.free(entry.allocation)
            entry.allocation = None

    def _resident(self, digest: str) -> Allocation:
        entry = self._entries[digest]
        if entry.allocation is None or entry.phase is not _Phase.RESIDENT or entry.pins == 0:
            raise ValueError(f"{digest} is {entry.phase} with {entry.pins} pins, not ready to run")
        return entry.allocation

    def _describe(self, entry: _Entry) -> ResidentAdapter:
        state = "resident" if entry.phase is _Phase.RESIDENT else "loading"
        allocation = entry.allocation
        return ResidentAdapter(
            digest=entry.source.digest,
            state="draining" if entry.retired else state,
            pinned_by=entry.pins,
            pages=0 if allocation is None else allocation.num_pages,
            num_bytes=0 if allocation is None else allocation.need.num_bytes,
            requests=entry.requests,
        )


_STATES = {
    _Phase.QUEUED: ResidencyState.LOADING,
    _Phase.READING: ResidencyState.LOADING,
    _Phase.PARKED: ResidencyState.NO_ROOM,
    _Phase.PACKING: ResidencyState.LOADING,
    _Phase.RESIDENT: ResidencyState.RESIDENT,
    _Phase.FAILED: ResidencyState.FAILED,
}


def _single_threaded() -> None:
    """Keep this thread's torch operators on this thread.

    OpenMP gives every thread that opens a parallel region a team of its own, kept for good. Once
    there are more team members than processors, libgomp lets all of them sleep between regions
    instead of spinning, and the step loop's hundreds of regions a step become half as fast.
    """
    torch.set_num_threads(1)
