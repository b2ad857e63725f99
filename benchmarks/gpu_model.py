"""A Llama of random weights on a device, its cache and its adapters: what decode steps are timed on.

It needs neither a checkpoint nor the server: weights are drawn on the device, and adapters are pages
filled with noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from polyloom.adapters.base_layout import BaseLayout, ModuleGroup
from polyloom.adapters.config import PAGE_RANKS, AdapterPoolConfig
from polyloom.adapters.kernels.choice import choose_cuda_lora_op
from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.adapters.layers import LoraLayers
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.placement import Allocation, PageNeed
from polyloom.adapters.segments import LoraBatch, lora_batch
from polyloom.kvcache.attention import PagedAttention
from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.config import KVCacheConfig
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.kvcache.storage import KVStorage
from polyloom.platform.engine.graphs import DecodeGraphs, DecodeParts, GraphSizes, Recorder
from polyloom.platform.engine.kernels.cuda import CudaOps
from polyloom.platform.engine.kernels.cuda_sampling import SampledRow, sample_rows
from polyloom.platform.engine.model.config import Activation, DecoderConfig, LayerConfig, RopeConfig
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.model.layout import base_layout, group_shapes
from polyloom.platform.engine.model.weights import FusedLinear

BLOCK_SIZE = 16
_Q_AND_V = 0b101  # of the slices q, k and v


@dataclass(frozen=True)
class Sizes:
    """Of a model and of what is served on it.

    context: most tokens that a sequence has.  batches: of decode steps, smallest first.
    populations: how many adapters are resident, from one on; the last one's are of rank 8 on q and v.
    """

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int
    context: int
    batches: tuple[int, ...]
    populations: tuple[int, ...]
    adapter_memory: int
    max_rank: int

    @property
    def max_batch(self) -> int:
        return self.batches[-1]


# With 1,024 tokens for each of 256 sequences this fits a card of 80 GB: 16 of weights, 35 of KV, 24
# of adapters, such as 64 of rank 64.
LLAMA_8B = Sizes(
    32,
    4096,
    14336,
    32,
    8,
    128,
    128256,
    1024,
    (1, 16, 64, 256),
    (1, 16, 64, 256, 1000),
    24 << 30,
    64,
)
LONG = replace(LLAMA_8B, layers=8, context=8192, batches=(64,), adapter_memory=4 << 30)
TINY = Sizes(2, 64, 96, 4, 2, 16, 128, 40, (1, 4), (1, 4, 6), 8 << 20, 64)


def decoder_config(sizes: Sizes) -> DecoderConfig:
    """A Llama of these sizes."""
    frequencies = [5e5 ** (-2 * i / sizes.dim) for i in range(sizes.dim // 2)]
    layer = LayerConfig(RopeConfig(tuple(frequencies), 1.0), None)
    return DecoderConfig(
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.dim,
        max_model_len=sizes.context + 64,
        activation=Activation.SILU,
        norm_eps=1e-5,
        norm_plus_one=False,
        sandwich_norms=False,
        qk_norm=False,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        fused_checkpoint=False,
        tied_head=False,
        embedding_scale=1.0,
        attention_scale=sizes.dim**-0.5,
        attention_softcap=None,
        residual_multiplier=1.0,
        logits_divisor=1.0,
        logits_softcap=None,
        layers=(layer,) * sizes.layers,
    )


class RandomWeights:
    """What a decoder reads of a checkpoint, drawn on the device."""

    def __init__(self, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._shapes = {shape.group: shape for shape in group_shapes(config)}

    def linear(self, group: ModuleGroup, layer: int) -> FusedLinear:
        shape = self._shapes[group]
        return FusedLinear(self._draw(shape.out_features, shape.in_features), None)

    def embedding(self) -> torch.Tensor:
        return self._draw(self._config.vocab_size, self._config.hidden_size)

    def layer_norm(self, layer: int, name: str) -> torch.Tensor:
        return torch.ones(self._config.hidden_size, dtype=self._dtype, device=self._device)

    def final_norm(self) -> torch.Tensor:
        return self.layer_norm(0, "")

    def check_all_read(self) -> None:
        """There is no checkpoint that could hold more."""

    def _draw(self, rows: int, columns: int) -> torch.Tensor:
        weight = torch.empty(rows, columns, dtype=self._dtype, device=self._device)
        return weight.normal_(std=columns**-0.5)


class ServedModel:
    """The parts of an engine that a decode step runs through."""

    def __init__(
        self, sizes: Sizes, dtype: torch.dtype, device: torch.device, recorder: Recorder
    ) -> None:
        self.sizes, self.device, self.config = sizes, device, decoder_config(sizes)
        self.capabilities = Capabilities()
        weights = RandomWeights(self.config, dtype, device)
        ops = CudaOps(self.capabilities, device)
        self.decoder = Decoder(self.config, weights, ops, dtype)  # type: ignore[arg-type]
        self.layout: BaseLayout = base_layout(self.config, name="random", digest="sha256:random")
        blocks = -(-(sizes.context + 1) // BLOCK_SIZE)
        cache = KVCacheConfig(
            sizes.layers,
            sizes.kv_heads,
            sizes.dim,
            BLOCK_SIZE,
            blocks * sizes.max_batch,
            dtype,
            device,
        )
        storage = KVStorage(cache)
        self.attention = PagedAttention(cache, storage, sizes.heads, "cuda", self.capabilities)
        choice = choose_cuda_lora_op(dtype, device)
        if choice.fallback_reason is not None:
            raise RuntimeError(f"no CUDA kernels: {choice.fallback_reason}")
        op = CudaLoraOp(dtype)
        pool = AdapterPoolConfig(sizes.adapter_memory, 1024, sizes.max_rank, dtype, device)
        self.pages = AdapterPages(pool, self.layout, op)
        self.lora_layers = LoraLayers(self.pages, replace(choice, op=op), self.capabilities)
        parts = DecodeParts(self.decoder, self.attention, self.lora_layers, self.pages, op)
        graphs = GraphSizes(sizes.max_batch, blocks * BLOCK_SIZE, BLOCK_SIZE)
        self.graphs = DecodeGraphs(parts, recorder, self.capabilities, graphs, device)
        self._blocks = blocks

    def adapter(self, rank: int, *, only_qv: bool = False) -> Allocation:
        """Pages of noise, on q and v or on all linear modules."""
        linear = [group for group in self.pages.pools if group != ModuleGroup.HEAD]
        chosen = [ModuleGroup.QKV] if only_qv else linear
        count = -(-rank // PAGE_RANKS)
        pools = self.pages.pools
        need = PageNeed(
            dict.fromkeys(chosen, count),
            frozenset(),
            sum(count * pools[group].page_bytes for group in chosen),
        )
        allocation = self.pages.allocate(need)
        if allocation is None:
            raise MemoryError(f"no room for an adapter of rank {rank}")
        for group, ids in allocation.pages.items():
            for page_id in ids:
                pools[group].page(page_id).normal_(std=0.01)
                every = (1 << len(pools[group].shape.slices)) - 1
                pools[group].masks[page_id] = _Q_AND_V if only_qv else every
        return allocation

    def adapter_bytes(self, rank: int, *, only_qv: bool = False) -> int:
        """What a decode token must read of such an adapter, in all layers."""
        total = 0
        for group, pool in self.pages.pools.items():
            parts = pool.shape.slices
            if group is ModuleGroup.HEAD or (only_qv and group is not ModuleGroup.QKV):
                continue
            read = [part for i, part in enumerate(parts) if not only_qv or _Q_AND_V >> i & 1]
            width = len(read) * pool.shape.in_features + sum(part.out_features for part in read)
            total += pool.shape.layers * width
        return total * rank * self.pages.config.dtype.itemsize

    def prompt(self, tokens: int) -> AttentionBatch:
        """The first chunk of one sequence, its whole prompt."""
        positions = torch.arange(tokens)
        table = torch.arange(self._blocks, dtype=torch.int32)[None]
        lengths = torch.tensor([tokens], dtype=torch.int32)
        starts = torch.tensor([0, tokens], dtype=torch.int32)
        return AttentionBatch(starts, lengths, table, positions, positions)

    def step(self, batch: int, context: int | None = None) -> AttentionBatch:
        """One more token of `batch` sequences of `context` tokens each, as many as fit if None."""
        tables = torch.arange(batch * self._blocks, dtype=torch.int32).view(batch, self._blocks)
        position = self.sizes.context if context is None else context
        return AttentionBatch(
            query_starts=torch.arange(batch + 1, dtype=torch.int32),
            context_lens=torch.full((batch,), position + 1, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=tables[:, position // BLOCK_SIZE].long() * BLOCK_SIZE
            + position % BLOCK_SIZE,
            positions=torch.full((batch,), position, dtype=torch.int64),
        )

    def segments(self, chosen: Sequence[Allocation | None], tokens: int = 1) -> LoraBatch:
        """So many tokens of each."""
        return lora_batch([(one, tokens) for one in chosen])

    def forward(self, batch: AttentionBatch, lora: LoraBatch, *, graphs: bool) -> torch.Tensor:
        """A step to its greedy tokens, one after each of its tokens."""
        ids, rows = [1] * batch.num_tokens, [SampledRow()] * batch.num_tokens
        output = self.graphs.run(ids, batch, lora, rows) if graphs else None
        if output is not None:
            return output.chosen
        there = torch.tensor(ids, device=self.device)
        hidden = self.decoder.forward(there, batch, lora, self.attention, self.lora_layers)
        return sample_rows(self.decoder.logits(hidden, lora, self.lora_layers), rows)
