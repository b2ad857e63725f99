"""Decode and verification steps as captured graphs: one for each bucket of tokens.

A graph replays launches with the arguments that it was captured with. So everything that differs from
step to step lies in memory that does not move: token ids, positions, and the plans of attention and
of the adapters, whose addresses of pages are data like the rest. Adapters come and go, and sequences
grow, without another capture. A step that fits no bucket runs eagerly and is counted with the reason.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from polyloom.adapters.base_layout import ModuleGroup
from polyloom.adapters.kernels.cuda import (
    CudaLoraOp,
    LoraFrame,
    lora_frame,
    plan_group,
)
from polyloom.adapters.layers import LoraLayers
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.segments import LoraBatch
from polyloom.kvcache.attention import PagedAttention
from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.kernels.cuda_attention import (
    MAX_QUERIES,
    AttentionFrame,
    attention_frame,
    plan_attention,
)
from polyloom.kvcache.kernels.device_arrays import filled
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.model.decoder import Decoder

OP_NAME = "graph"
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Forward = Callable[[], torch.Tensor]


class Recorder(Protocol):
    """What turns a forward into something that replays it."""

    def capture(self, forward: Forward) -> Forward:
        """Run `forward` once or more and return what repeats it into the same result tensor."""
        ...


class CudaRecorder:
    """Graphs of a CUDA device, all in one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, forward: Forward) -> Forward:
        warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):  # compiles and loads every kernel, which a capture may not
            forward()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        # Loader threads allocate meanwhile; only this thread's calls belong to the graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = forward()
        self._pool = graph.pool()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True)
class _Bucket:
    """One captured graph. batch and lora are what it was captured with; their plans lie in frames."""

    tokens: int
    ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionFrame
    lora: dict[ModuleGroup, LoraFrame]
    replay: Forward


class DecodeGraphs:
    """The graphs of one engine. Owned by the step loop."""

    def __init__(
        self,
        decoder: Decoder,
        attention: PagedAttention,
        lora_layers: LoraLayers,
        pages: AdapterPages,
        op: CudaLoraOp,
        recorder: Recorder,
        capabilities: Capabilities,
        *,
        max_tokens: int,
        max_blocks: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """max_tokens: of the largest bucket, at most `BUCKETS`'s.  max_blocks: of a context."""
        self._decoder, self._attention, self._lora_layers = decoder, attention, lora_layers
        self._pages, self._op, self._recorder = pages, op, recorder
        self._max_blocks, self._block_size, self._device = max_blocks, block_size, device
        self._ledger = capabilities.register(OP_NAME, "cuda")
        self.sizes = tuple(size for size in BUCKETS if size <= max_tokens)
        self._ledger.buckets = self.sizes
        self._buckets: dict[tuple[int, bool, bool], _Bucket] = {}
        self.capture_seconds = 0.0

    def capture_all(self) -> None:
        """Capture every bucket: decode and verification, with adapters and without."""
        for size in self.sizes:
            for verifies in (False, True):
                for adapted in (False, True):
                    self._bucket(size, verifies, adapted)

    def forward(
        self, token_ids: Sequence[int], batch: AttentionBatch, lora: LoraBatch
    ) -> torch.Tensor | None:
        """`Decoder.forward` by a graph, [T, hidden], good until the next call; None if none fits."""
        longest = int(batch.query_starts.diff().max())
        reason = self._unfit(len(token_ids), longest, batch)
        if reason is not None:
            self._ledger.fell_back(reason)
            return None
        self._ledger.engaged += 1
        size = next(size for size in self.sizes if size >= len(token_ids))
        bucket = self._bucket(size, longest > 1, not lora.empty)
        self._refill(bucket, token_ids, batch, lora)
        return bucket.replay()[: len(token_ids)]

    def _unfit(self, tokens: int, longest: int, batch: AttentionBatch) -> str | None:
        """Why no bucket fits a step; None if one does."""
        if longest > MAX_QUERIES:
            return "a chunk of a prompt is in the step"
        if not self.sizes or tokens > self.sizes[-1]:
            return "more tokens than the largest bucket"
        if batch.block_tables.shape[1] > self._max_blocks:
            return "a context is longer than the buckets are for"
        return None

    def _refill(
        self, bucket: _Bucket, ids: Sequence[int], batch: AttentionBatch, lora: LoraBatch
    ) -> None:
        """Write a step into the memory that the bucket's graph reads."""
        for target, values in (
            (bucket.ids, np.array(ids)),
            (bucket.positions, batch.positions.numpy()),
        ):
            target.copy_(torch.from_numpy(filled(values, (bucket.tokens,), 0)), non_blocking=True)
        plan_attention(batch, self._device, bucket.attention)
        for group, frame in bucket.lora.items():
            plan_group(self._pages.pools[group], lora, self._device, frame)

    def _bucket(self, size: int, verifies: bool, adapted: bool) -> _Bucket:
        key = (size, verifies, adapted)
        if key not in self._buckets:
            start = time.perf_counter()
            self._buckets[key] = self._capture(*key)
            self.capture_seconds += time.perf_counter() - start
        return self._buckets[key]

    def _capture(self, size: int, verifies: bool, adapted: bool) -> _Bucket:
        ids, positions = (
            torch.zeros(size, dtype=torch.int64, device=self._device) for _ in range(2)
        )
        queries = MAX_QUERIES if verifies else 1
        frame = attention_frame(size, self._max_blocks, self._block_size, queries, self._device)
        groups: list[ModuleGroup] = [
            group for group in self._pages.pools if adapted and group != ModuleGroup.HEAD
        ]
        frames = {
            group: lora_frame(
                self._pages.pools[group], size, self._pages.config.max_rank, self._device
            )
            for group in groups
        }
        batch, lora = _nothing(positions), _no_adapters(groups)
        attention_plan = plan_attention(_EMPTY, self._device, frame)
        lora_plans = {
            group: plan_group(
                self._pages.pools[group], _no_adapters([]), self._device, frames[group]
            )
            for group in groups
        }

        def forward() -> torch.Tensor:
            self._attention.use(batch, attention_plan)
            self._op.use(lora, lora_plans)
            return self._decoder.forward(ids, batch, lora, self._attention, self._lora_layers)

        replay = self._recorder.capture(forward)
        return _Bucket(size, ids, positions, frame, frames, replay)


_NONE = torch.zeros(0, dtype=torch.int64)
_EMPTY = AttentionBatch(
    query_starts=torch.zeros(1, dtype=torch.int32),
    context_lens=torch.zeros(0, dtype=torch.int32),
    block_tables=torch.zeros(0, 1, dtype=torch.int32),
    slot_mapping=_NONE,
    positions=_NONE,
)


def _nothing(positions: torch.Tensor) -> AttentionBatch:
    """A step whose plan is given; only its positions are read."""
    return AttentionBatch(
        _EMPTY.query_starts, _EMPTY.context_lens, _EMPTY.block_tables, _NONE, positions
    )


def _no_adapters(groups: Sequence[ModuleGroup]) -> LoraBatch:
    """A step of the base alone that still runs the launches of `groups`, on empty tiles."""
    table = torch.full((1, 1), -1, dtype=torch.int32)
    return LoraBatch(
        starts=torch.zeros(2, dtype=torch.int32),
        slots=torch.full((1,), -1, dtype=torch.int32),
        pages=dict.fromkeys(groups, table),
        rows=frozenset(),
    )
