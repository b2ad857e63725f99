"""The engine's side of the comparison: its decoder over real rank pages and a real paged cache."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from polyloom.adapters.base_layout import BaseLayout
from polyloom.adapters.config import PAGE_RANKS, AdapterPoolConfig
from polyloom.adapters.kernels.choice import LoraChoice
from polyloom.adapters.layers import LoraLayers
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.segments import LoraBatch, lora_batch
from polyloom.adapters.weights import AdapterWeights, BaseWeights
from polyloom.kvcache.attention import PagedAttention
from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.config import KVCacheConfig
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.kvcache.storage import KVStorage
from polyloom.platform.engine.fidelity.streamed_engine import StreamedOps, StreamedWeights
from polyloom.platform.engine.kernels.ops import EngineOps
from polyloom.platform.engine.model.config import DecoderConfig
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.model.weights import FusedWeights

_BLOCK_SIZE = 16
_CPU = torch.device("cpu")
_DTYPE = torch.float32


class EngineSide:
    """A base in the engine's decoder, fp32."""

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        layout: BaseLayout,
        ops: EngineOps,
        lora: LoraChoice,
        *,
        streamed: bool,
    ) -> None:
        self._config = config
        self._layout = layout
        self._lora = lora
        weights: FusedWeights
        if streamed:
            weights = StreamedWeights(folder, config, _DTYPE)
            ops = StreamedOps(ops, weights)
        else:
            weights = FusedWeights(folder, config, _DTYPE)
        self._weights = weights
        self._decoder = Decoder(config, weights, ops, _DTYPE)

    @property
    def base(self) -> BaseWeights:
        """The checkpoint's own rows."""
        return self._weights

    def logprobs(
        self, adapter: AdapterWeights, sequences: Sequence[Sequence[int]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Logprobs `[len, vocab]` of each sequence under the adapter, and of each under the base.

        All run in one batch, so that rows with and without the adapter lie side by side.
        """
        pages = AdapterPages(self._pool_config(adapter), self._layout, self._lora.op)
        need = pages.need(adapter)
        allocation = pages.allocate(need)
        if allocation is None:
            raise MemoryError(f"{adapter.digest}: no pages for {need.num_bytes} bytes")
        pages.write(allocation, adapter)
        lengths = [len(s) for s in sequences]
        segments = [(allocation, n) for n in lengths] + [(None, n) for n in lengths]
        layers = LoraLayers(pages, self._lora, Capabilities())
        logits = self._forward([*sequences, *sequences], lora_batch(segments), layers)
        logprobs = [torch.log_softmax(part, dim=-1) for part in torch.split(logits, lengths * 2)]
        return logprobs[: len(lengths)], logprobs[len(lengths) :]

    def _forward(
        self, sequences: Sequence[Sequence[int]], lora: LoraBatch, layers: LoraLayers
    ) -> torch.Tensor:
        batch = _attention_batch([len(s) for s in sequences])
        tokens = torch.tensor([token for sequence in sequences for token in sequence])
        attention = self._attention(batch)
        hidden = self._decoder.forward(tokens, batch, lora, attention, layers)
        return self._decoder.logits(hidden, lora, layers)

    def _attention(self, batch: AttentionBatch) -> PagedAttention:
        config = self._config
        cache = KVCacheConfig(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=_BLOCK_SIZE,
            num_blocks=batch.block_tables.numel(),
            dtype=_DTYPE,
            device=_CPU,
        )
        return PagedAttention(
            cache,
            KVStorage(cache),
            config.num_heads,
            "reference" if self._lora.op.name == "reference" else "cpu",
            Capabilities(),
        )

    def _pool_config(self, adapter: AdapterWeights) -> AdapterPoolConfig:
        """Room for exactly one revision: this one."""
        elements = 0
        for shape in self._layout.groups:
            num_pages = -(-adapter.rank(shape.group) // PAGE_RANKS)
            elements += num_pages * shape.layers * self._lora.op.layer_elements(shape)
            elements += shape.layers * (2 * shape.out_features + PAGE_RANKS)
        return AdapterPoolConfig(
            memory_bytes=(elements + 1024) * _DTYPE.itemsize,
            max_slots=1,
            max_rank=max(term.a.shape[0] for term in adapter.terms),
            dtype=_DTYPE,
            device=_CPU,
        )


def _attention_batch(lengths: Sequence[int]) -> AttentionBatch:
    """Whole sequences from position 0; each has its own blocks, handed out in reverse order."""
    width = -(-max(lengths) // _BLOCK_SIZE)
    tables = torch.arange(len(lengths) * width).flip(0).view(len(lengths), width)
    positions = torch.cat([torch.arange(n) for n in lengths])
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    slots = tables[rows, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    return AttentionBatch(
        query_starts=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables.to(torch.int32),
        slot_mapping=slots,
        positions=positions,
    )
