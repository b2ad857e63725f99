"""Which draft heads are on the device: shared heads by digest, each with its adapters' deltas.

Nothing ever waits for a head: it is loaded beside the steps when a sequence first wants a draft, and
until it is there, or if it cannot be, the sequence goes on without drafts.
"""

import logging
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from polyloom.adapters.config import AdapterPoolConfig
from polyloom.adapters.draft_heads.checkpoint import DraftHead, draft_vocabulary
from polyloom.adapters.draft_heads.layout import head_layout
from polyloom.adapters.draft_heads.validation import delta_weights, load_verified
from polyloom.adapters.errors import AdapterError, InvalidAdapterError
from polyloom.adapters.kernels.choice import LoraChoice
from polyloom.adapters.layers import LoraLayers
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.residency import RETRY_SECONDS, Residency, ResidencyState
from polyloom.adapters.segments import LoraBatch
from polyloom.adapters.source import AdapterSource, DraftHeadSource
from polyloom.adapters.weights import AdapterWeights, BaseWeights
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.draft_heads.packed import PackedHead
from polyloom.platform.engine.kernels.ops import EngineOps

logger = logging.getLogger("polyloom.engine")

MAX_SHARED_HEADS = 2
"""On the device at once: a base's own, and the one that replaces it."""


@dataclass(frozen=True)
class Reach:
    """What a head can draft: `depth` tokens in a row, of the target ids `vocabulary` (uint32)."""

    depth: int
    vocabulary: NDArray[np.uint32]


class DeltaLoader:
    """`adapters.loader.Loader` of adapters' heads on one shared head.

    reaches: by the head's digest.  heads_of: digests of heads, by the adapter's.
    """

    def __init__(self, shared: DraftHead) -> None:
        self.reaches: dict[str, Reach] = {}
        self.heads_of: defaultdict[str, set[str]] = defaultdict(set)
        self._shared = shared

    def load(self, source: AdapterSource) -> AdapterWeights:
        head = load_verified(Path(source.path), source.digest)
        weights = delta_weights(head, self._shared)
        self.reaches[source.digest] = reach(head)
        self.heads_of[str(head.config.adapter_digest)].add(source.digest)
        return weights


def reach(head: DraftHead) -> Reach:
    """What `head` can draft."""
    ids = draft_vocabulary(head.tensors).to(torch.uint32).numpy()
    return Reach(head.config.max_drafts, ids)


@dataclass(eq=False)
class SharedHead:
    """A shared head that is ready, and where its adapters' deltas are."""

    packed: PackedHead
    own_reach: Reach
    residency: Residency
    layers: LoraLayers
    loader: DeltaLoader

    def reach(self, delta: AdapterSource | None) -> Reach:
        """What a row of this (resident) delta, or of the shared head alone, can draft."""
        return self.own_reach if delta is None else self.loader.reaches[delta.digest]

    def forget_unloaded(self) -> None:
        """Drop what is known of deltas that are not on the device any more."""
        held = {adapter.digest for adapter in self.residency.snapshot()}
        for digest in self.loader.reaches.keys() - held:
            del self.loader.reaches[digest]

    def batch(self, deltas: Sequence[AdapterSource | None]) -> LoraBatch:
        """Describe rows, one each, by their resident deltas."""
        return self.residency.batch([(None if d is None else d.digest, 1) for d in deltas])


@dataclass(eq=False)
class _Entry:
    """One shared head. users: sequences by id, each with the delta that it has pinned, or None."""

    loading: Future[SharedHead] | None
    ready: SharedHead | None = None
    retired: bool = False
    users: dict[str, str | None] = field(default_factory=dict)


def loader_threads() -> Executor:
    """One thread whose torch operators stay on it."""
    return ThreadPoolExecutor(
        1, thread_name_prefix="head-load", initializer=torch.set_num_threads, initargs=(1,)
    )


class DraftHeads:
    """Heads by digest. Every method belongs to the step loop's thread."""

    def __init__(
        self,
        base: BaseWeights,
        ops: EngineOps,
        lora: LoraChoice,
        deltas: AdapterPoolConfig,
        capabilities: Capabilities,
        make_workers: Callable[[], Executor] = loader_threads,
    ) -> None:
        """deltas: pool of the adapters' heads of each shared head.  make_workers: where files are
        read, for shared heads and for the deltas of each."""
        self._base = base
        self._ops = ops
        self._lora = lora
        self._deltas = deltas
        self._capabilities = capabilities
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._failed: dict[str, float] = {}  # until when: what cannot be read now, may be later
        self._make_workers = make_workers
        self._workers = make_workers()

    def ready(self, sequence_id: str, source: DraftHeadSource) -> SharedHead | None:
        """The head that a sequence drafts with, held for it until `release`; None while it is not
        there, which starts its load."""
        entry = self._entry(source.shared)
        if entry is None:
            return None
        self._entries.move_to_end(source.shared.digest)
        entry.users.setdefault(sequence_id, None)
        self._take_in(source.shared.digest, entry)
        shared = entry.ready
        if shared is None or source.delta is None:
            return shared
        return shared if self._delta_ready(sequence_id, entry, shared, source.delta) else None

    def release(self, sequence_id: str) -> None:
        """A sequence has ended; one that held nothing is no error."""
        for digest, entry in list(self._entries.items()):
            if sequence_id not in entry.users:
                continue
            delta = entry.users.pop(sequence_id)
            if delta is not None and entry.ready is not None:
                entry.ready.residency.unpin(delta)
            if entry.retired and not entry.users:
                self._drop(digest)

    def retire(self, digest: str) -> None:
        """Unload a head, or the heads of an adapter, once no sequence holds them."""
        self._failed.pop(digest, None)
        for shared in [e.ready for e in self._entries.values() if e.ready is not None]:
            for delta in (digest, *shared.loader.heads_of.pop(digest, ())):
                shared.residency.retire(delta)
        entry = self._entries.get(digest)
        if entry is not None:
            entry.retired = True
            if not entry.users:
                self._drop(digest)

    def check(self) -> None:
        """AssertionError if a sequence holds anything; for idle checks."""
        for entry in self._entries.values():
            assert not entry.users, f"draft heads are held by {sorted(entry.users)}"
            if entry.ready is not None:
                entry.ready.residency.check()

    def close(self) -> None:
        """Stop the loader threads."""
        self._workers.shutdown(wait=True, cancel_futures=True)
        for entry in self._entries.values():
            if entry.ready is not None:
                entry.ready.residency.close()

    def _entry(self, source: AdapterSource) -> _Entry | None:
        entry = self._entries.get(source.digest)
        failed = time.monotonic() < self._failed.get(source.digest, 0.0)
        if entry is None and not failed and self._make_room():
            entry = _Entry(self._workers.submit(self._load, source))
            self._entries[source.digest] = entry
        return entry

    def _make_room(self) -> bool:
        if len(self._entries) < MAX_SHARED_HEADS:
            return True
        unused = (d for d, e in self._entries.items() if not e.users and e.ready is not None)
        oldest = next(unused, None)
        if oldest is None:
            return False
        self._drop(oldest)
        return True

    def _take_in(self, digest: str, entry: _Entry) -> None:
        """Take what the loader thread has finished."""
        if entry.loading is None or not entry.loading.done():
            return
        error = entry.loading.exception()
        if isinstance(error, Exception):  # whatever a file brings costs its drafts only
            self._fail(digest, error)
            del self._entries[digest]
            return
        entry.ready, entry.loading = entry.loading.result(), None

    def _delta_ready(
        self, sequence_id: str, entry: _Entry, shared: SharedHead, delta: AdapterSource
    ) -> bool:
        residency = shared.residency
        residency.poll()
        if entry.users[sequence_id] is None:
            state = residency.pin(delta)
            if state is ResidencyState.FAILED:
                self._fail(delta.digest, residency.failure(delta.digest))
                return False
            entry.users[sequence_id] = delta.digest
            shared.forget_unloaded()
        state = residency.state(delta.digest)
        if state is ResidencyState.FAILED:
            self._fail(delta.digest, residency.failure(delta.digest))
        return state is ResidencyState.RESIDENT

    def _fail(self, digest: str, error: Exception) -> None:
        """Note why a head is not used; deltas are tried again by their residency."""
        if digest not in self._failed:
            logger.error("draft head %s is not used: %s", digest, error)
        forever = isinstance(error, AdapterError)
        self._failed[digest] = math.inf if forever else time.monotonic() + RETRY_SECONDS

    def _load(self, source: AdapterSource) -> SharedHead:
        head = load_verified(Path(source.path), source.digest)
        if not head.config.is_shared:
            raise InvalidAdapterError("shared_head_digest", "a shared head has none")
        pool = self._deltas
        packed = PackedHead(head, self._base, self._ops, pool.dtype, pool.device)
        pages = AdapterPages(pool, head_layout(head.config), self._lora.op)
        loader = DeltaLoader(head)
        layers = LoraLayers(pages, self._lora, self._capabilities, "draft_lora")
        residency = Residency(pages, loader, workers=self._make_workers())
        return SharedHead(packed, reach(head), residency, layers, loader)

    def _drop(self, digest: str) -> None:
        entry = self._entries.pop(digest)
        if entry.ready is not None:
            entry.ready.residency.close()
