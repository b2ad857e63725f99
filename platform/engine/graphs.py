"""Decode and verification steps as captured graphs: one for each bucket of tokens.

A graph goes from token ids to the tokens that follow them: the decoder, the logits of every row and
their sampling. It replays launches with the arguments that it was captured with, so everything that
differs from step to step lies in memory that does not move: token ids, positions, what each row is
sampled by, and the plans of attention and of the adapters, whose addresses of pages are data like the
rest. Adapters come and go, and sequences grow, without another capture. A step that fits no bucket
runs eagerly and is counted with the reason.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from polyloom.adapters.base_layout import ModuleGroup
from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.adapters.kernels.cuda_plan import LoraFrame, lora_frame, plan_group
from polyloom.adapters.layers import LoraLayers
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.segments import LoraBatch
from polyloom.kvcache.attention import PagedAttention
from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.kernels.cuda_attention_plan import (
    MAX_QUERIES,
    AttentionFrame,
    attention_frame,
    plan_attention,
)
from polyloom.kvcache.kernels.device_arrays import filled, to_device
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.kernels.cuda_sampling import (
    ROW_BYTES,
    UNREAD,
    SampledRow,
    describe_rows,
    sample_described,
)
from polyloom.platform.engine.model.decoder import Decoder

logger = logging.getLogger("polyloom.engine")

OP_NAME = "graph"
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class StepOutput:
    """What a step leaves on the device, good until the next one.

    hidden: [T, hidden], final-normed.  logits: [T, vocab] fp32, as sampling left them.  chosen: [T]
    int32, the token that each row asked for.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    chosen: torch.Tensor

    def first(self, tokens: int) -> "StepOutput":
        return StepOutput(self.hidden[:tokens], self.logits[:tokens], self.chosen[:tokens])


Step = Callable[[], StepOutput]


class Recorder(Protocol):
    """What turns a step into something that replays it."""

    def capture(self, step: Step) -> Step:
        """Run `step` once or more and return what repeats it into the same result tensors."""
        ...


class CudaRecorder:
    """Graphs of a CUDA device, all in one pool of memory."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, step: Step) -> Step:
        warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):  # compiles and loads every kernel, which a capture may not
            step()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        # Loader threads allocate meanwhile; only this thread's calls belong to the graph.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = step()
        self._pool = graph.pool()

        def replay() -> StepOutput:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True)
class DecodeParts:
    """What a step runs through. op: the one that `pages` were made for."""

    decoder: Decoder
    attention: PagedAttention
    lora_layers: LoraLayers
    pages: AdapterPages
    op: CudaLoraOp


@dataclass(frozen=True)
class GraphSizes:
    """What graphs are captured for: steps of up to max_tokens, contexts of up to max_model_len."""

    max_tokens: int
    max_model_len: int
    block_size: int

    @property
    def max_blocks(self) -> int:
        return -(-self.max_model_len // self.block_size)


@dataclass(frozen=True)
class _Bucket:
    """One captured graph, and the memory that it reads. inputs: ids, positions, then the rows."""

    tokens: int
    inputs: torch.Tensor
    attention: AttentionFrame
    lora: dict[ModuleGroup, LoraFrame]
    replay: Step


class DecodeGraphs:
    """The graphs of one engine. Owned by the step loop."""

    def __init__(
        self,
        parts: DecodeParts,
        recorder: Recorder,
        capabilities: Capabilities,
        sizes: GraphSizes,
        device: torch.device,
    ) -> None:
        self._parts, self._recorder, self._sizes, self._device = parts, recorder, sizes, device
        self._ledger = capabilities.register(
            OP_NAME, "cuda", "decode and verification, from token ids to the tokens that follow"
        )
        self.sizes = tuple(size for size in BUCKETS if size <= sizes.max_tokens)
        self._ledger.buckets = self.sizes
        self._buckets: dict[tuple[int, bool, bool], _Bucket] = {}
        vocabulary = parts.decoder.config.vocab_size
        self._logits = torch.empty(
            max(self.sizes, default=0), vocabulary, dtype=torch.float32, device=device
        )  # of all graphs: none keeps a copy of its own

    @property
    def capture_seconds(self) -> float:
        """Spent on captures so far, compilation at the first of them included."""
        return self._ledger.seconds

    def capture_all(self) -> None:
        """Capture every bucket: decode and verification, with adapters and without."""
        for size in self.sizes:
            for verifies in (False, True):
                for adapted in (False, True):
                    self._bucket(size, verifies, adapted)
        logger.info("captured graphs of %s tokens in %.1f s", self.sizes, self.capture_seconds)

    def run(
        self,
        token_ids: Sequence[int],
        batch: AttentionBatch,
        lora: LoraBatch,
        rows: Sequence[SampledRow],
    ) -> StepOutput | None:
        """A step of T tokens by a graph, None if none fits; rows: what follows each of the tokens."""
        longest = int(batch.query_starts.diff().max())
        reason = self._unfit(len(token_ids), longest, batch)
        if reason is not None:
            self._ledger.fell_back(reason)
            return None
        self._ledger.engaged += 1
        size = next(size for size in self.sizes if size >= len(token_ids))
        bucket = self._bucket(size, longest > 1, not lora.empty)
        edits = self._refill(bucket, token_ids, batch, lora, rows)
        output = bucket.replay().first(len(token_ids))
        del edits  # the launches that read them are under way
        return output

    def _unfit(self, tokens: int, longest: int, batch: AttentionBatch) -> str | None:
        """Why no bucket fits a step; None if one does."""
        if longest > MAX_QUERIES:
            return "a chunk of a prompt is in the step"
        if not self.sizes or tokens > self.sizes[-1]:
            return "more tokens than the largest bucket"
        if batch.block_tables.shape[1] > self._sizes.max_blocks:
            return "a context is longer than the buckets are for"
        return None

    def _refill(
        self,
        bucket: _Bucket,
        ids: Sequence[int],
        batch: AttentionBatch,
        lora: LoraBatch,
        rows: Sequence[SampledRow],
    ) -> torch.Tensor:
        """Write a step into the memory that the bucket's graph reads; edits to be kept until then."""
        padding = bucket.tokens - len(ids)
        described, edits = describe_rows([*rows, *[UNREAD] * padding], self._device)
        padded = (
            filled(np.array(ids), (bucket.tokens,), 0),
            filled(batch.positions.numpy(), (bucket.tokens,), 0),
        )
        to_device((*padded, described), self._device, bucket.inputs)
        plan_attention(batch, self._device, bucket.attention)
        for group, frame in bucket.lora.items():
            plan_group(self._parts.pages.pools[group], lora, self._device, frame)
        return edits

    def _bucket(self, size: int, verifies: bool, adapted: bool) -> _Bucket:
        key = (size, verifies, adapted)
        if key not in self._buckets:
            start = time.perf_counter()
            self._buckets[key] = self._capture(*key)
            self._ledger.seconds += time.perf_counter() - start
        return self._buckets[key]

    def _capture(self, size: int, verifies: bool, adapted: bool) -> _Bucket:
        """Capture a step of nothing but padding; its plans lie where those of real steps will."""
        parts, device, pools = self._parts, self._device, self._parts.pages.pools
        inputs = torch.zeros(size * (16 + ROW_BYTES) + 32, dtype=torch.uint8, device=device)
        nothing = np.zeros(size, dtype=np.int64)
        described, _ = describe_rows([UNREAD] * size, device)
        ids, positions, rows = to_device((nothing, nothing, described), device, inputs)
        frame = attention_frame(
            size,
            self._sizes.max_blocks,
            self._sizes.block_size,
            MAX_QUERIES if verifies else 1,
            device,
        )
        frames = {
            group: lora_frame(pools[group], size, parts.pages.config.max_rank, device)
            for group in (pools if adapted else ())
        }
        batch, lora = replace(_EMPTY, positions=positions), _no_adapters(frames)
        attention_plan = plan_attention(_EMPTY, device, frame)
        lora_plans = {
            group: plan_group(pools[group], _no_adapters(()), device, own)
            for group, own in frames.items()
        }

        def step() -> StepOutput:
            parts.attention.use(batch, attention_plan)
            parts.op.use(lora, lora_plans)
            hidden = parts.decoder.forward(ids, batch, lora, parts.attention, parts.lora_layers)
            logits = parts.decoder.logits(hidden, lora, parts.lora_layers, self._logits[:size])
            return StepOutput(hidden, logits, sample_described(logits, rows))

        return _Bucket(size, inputs, frame, frames, self._recorder.capture(step))


_NONE = torch.zeros(0, dtype=torch.int64)
_EMPTY = AttentionBatch(
    query_starts=torch.zeros(1, dtype=torch.int32),
    context_lens=torch.zeros(0, dtype=torch.int32),
    block_tables=torch.zeros(0, 1, dtype=torch.int32),
    slot_mapping=_NONE,
    positions=_NONE,
)


def _no_adapters(groups: Iterable[ModuleGroup]) -> LoraBatch:
    """A step of the base alone that still runs the launches of `groups`, on empty tiles."""
    table = torch.full((1, 1), -1, dtype=torch.int32)
    return LoraBatch(
        starts=torch.zeros(2, dtype=torch.int32),
        slots=torch.full((1,), -1, dtype=torch.int32),
        pages=dict.fromkeys(groups, table),
        rows=frozenset(),
    )
