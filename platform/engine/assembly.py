"""Builds one engine from its settings: owns every object that lives as long as the process."""

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch

from polyloom.adapters.base_layout import BaseLayout
from polyloom.adapters.config import AdapterPoolConfig
from polyloom.adapters.kernels.choice import LoraChoice, choose_cuda_lora_op, choose_lora_op
from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.adapters.kernels.reference import ReferenceLoraOp
from polyloom.adapters.layers import LoraLayers
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.residency import Residency
from polyloom.adapters.source import AdapterSource
from polyloom.adapters.weights import AdapterWeights, BaseWeights
from polyloom.kvcache.attention import Implementation, PagedAttention
from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.config import KVCacheConfig, blocks_for_memory
from polyloom.kvcache.kernels.cuda import unavailable
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.kvcache.manager import KVCacheManager
from polyloom.kvcache.prefix_cache import PrefixCache
from polyloom.kvcache.storage import KVStorage
from polyloom.platform.engine.admission import Admission
from polyloom.platform.engine.device_sampling import DeviceSampler
from polyloom.platform.engine.draft_heads.heads import DraftHeads
from polyloom.platform.engine.errors import EngineStartError
from polyloom.platform.engine.graphs import CudaRecorder, DecodeGraphs, DecodeParts, GraphSizes
from polyloom.platform.engine.kernels.cpu import CpuOps
from polyloom.platform.engine.kernels.cuda import CudaOps
from polyloom.platform.engine.kernels.ops import EngineOps, ReferenceOps
from polyloom.platform.engine.model.config import DecoderConfig
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.layout import base_layout
from polyloom.platform.engine.model.weights import FusedWeights
from polyloom.platform.engine.prefix import EnginePrefixCache
from polyloom.platform.engine.runner import ModelRunner
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.speculation.draft_head import DraftHeadDrafter
from polyloom.platform.engine.speculation.draft_model import DraftModelDrafter
from polyloom.platform.engine.speculation.draft_model_loading import load_draft_model
from polyloom.platform.engine.speculation.drafter import Drafter
from polyloom.platform.engine.speculation.ngram import NgramDrafter
from polyloom.platform.engine.speculation.speculator import DraftBlocks, Speculator
from polyloom.platform.engine.step import Engine
from polyloom.platform.engine.structured.compiler import GrammarCompiler
from polyloom.platform.engine.structured.drafter import FittingDrafter, GrammarDrafter
from polyloom.platform.engine.structured.sequences import SequenceGrammars
from polyloom.routing.scheduler.batcher import Batcher
from polyloom.routing.scheduler.config import SchedulerConfig

logger = logging.getLogger("polyloom.engine")

MAX_RESIDENT_ADAPTERS = 1024
_MIN_DELTA_MEMORY = 1 << 24


MakeSpeculator = Callable[[Sequence[Drafter], DraftBlocks, int], Speculator]
"""From an engine's drafters, its blocks and its token budget."""


class RevisionLoader:
    """`adapters.loader.Loader` over the folders that revisions are stored in.

    What reads adapters imports PEFT, which takes several times as long as the rest of a start; so
    it is imported beside the first steps, not before them.
    """

    @staticmethod
    def warm_up() -> None:
        """Import what `load` needs, in a thread; a load that comes earlier waits for it."""
        name = "polyloom.adapters.validation"
        threading.Thread(target=import_module, args=(name,), name="import", daemon=True).start()

    def __init__(self, layout: BaseLayout, base: BaseWeights) -> None:
        self._layout = layout
        self._base = base

    def load(self, source: AdapterSource) -> AdapterWeights:
        from polyloom.adapters.validation import load_adapter_weights

        return load_adapter_weights(Path(source.path), self._layout, self._base, source.digest)


def build_engine(settings: EngineSettings, make_speculator: MakeSpeculator = Speculator) -> Engine:
    """An engine ready to step.

    Raises:
        EngineStartError: a setting cannot be met.
        ModelError: the base cannot be served.
    """
    dtype, device = getattr(torch, settings.dtype), torch.device(settings.device)
    implementation = _implementation(settings, dtype, device)
    config, capabilities = read_config(Path(settings.model_folder)), Capabilities()
    weights = FusedWeights(Path(settings.model_folder), config, dtype, device)
    layout = base_layout(config, name=settings.base_name, digest=settings.base_digest)
    ops = _engine_ops(implementation, capabilities, device)
    decoder = Decoder(config, weights, ops, dtype)
    cache = _cache_config(settings, config, dtype, device)
    attention = _attention(cache, config.num_heads, implementation, capabilities)
    lora = _lora_op(implementation, dtype, device)
    pool = AdapterPoolConfig(
        settings.adapter_memory, MAX_RESIDENT_ADAPTERS, settings.max_rank, dtype, device
    )
    pages = AdapterPages(pool, layout, lora.op)
    lora_layers = LoraLayers(pages, lora, capabilities)
    residency = Residency(pages, RevisionLoader(layout, weights))
    draft_heads = DraftHeads(weights, ops, lora, _delta_pool(pool), capabilities)
    scheduler, block_pool = _scheduler_config(settings, config, cache), BlockPool(cache.num_blocks)
    prefix_cache = _prefix_cache(settings, cache, block_pool, attention, scheduler.max_model_len)
    blocks = KVCacheManager(block_pool, cache.block_size, prefix_cache)
    grammars = SequenceGrammars(GrammarCompiler(config.vocab_size))
    drafters = _drafters(settings, decoder, draft_heads, grammars)
    if settings.draft_model is not None:
        drafters.append(_draft_model(settings, ops, implementation))
    speculator = make_speculator(drafters, blocks, settings.token_budget)
    graphs = None
    if device.type == "cuda" and isinstance(lora.op, CudaLoraOp):
        sizes = GraphSizes(settings.max_running, scheduler.max_model_len, cache.block_size)
        parts = DecodeParts(decoder, attention, lora_layers, pages, lora.op)
        graphs = DecodeGraphs(parts, CudaRecorder(), capabilities, sizes, device)
        graphs.capture_all()
    return Engine(
        Admission(settings.base_digest, config.vocab_size),
        Batcher(scheduler, blocks, residency),
        ModelRunner(
            decoder,
            attention,
            lora_layers,
            residency,
            blocks,
            grammars,
            cache.block_size,
            device,
            keeps_hidden=speculator.needs_hidden,
            graphs=graphs,
            sampler=DeviceSampler(capabilities, device) if implementation == "cuda" else None,
        ),
        blocks,
        EnginePrefixCache(prefix_cache, settings.stored_dtype, capabilities),
        grammars,
        speculator,
        pages,
        residency,
        draft_heads,
        capabilities,
    )


def _drafters(
    settings: EngineSettings,
    decoder: Decoder,
    draft_heads: DraftHeads,
    grammars: SequenceGrammars,
) -> list[Drafter]:
    drafters: list[Drafter] = []
    if "ngram" in settings.drafters:
        drafters.append(FittingDrafter(NgramDrafter(), grammars))
    if "draft_head" in settings.drafters:
        drafters.append(FittingDrafter(DraftHeadDrafter(decoder, draft_heads), grammars))
    if "grammar" in settings.drafters:
        drafters.append(GrammarDrafter(grammars))
    return drafters


def _draft_model(
    settings: EngineSettings, ops: EngineOps, implementation: Implementation
) -> DraftModelDrafter:
    """Its attention's calls are not counted: the ledger is of the target's."""

    def attention(cache: KVCacheConfig, storage: KVStorage, num_heads: int) -> PagedAttention:
        return PagedAttention(cache, storage, num_heads, implementation, Capabilities())

    folder = Path(settings.draft_model or "")
    return DraftModelDrafter(load_draft_model(settings, folder, ops, attention))


def _delta_pool(adapters: AdapterPoolConfig) -> AdapterPoolConfig:
    """Memory of the adapters' draft heads: they are small beside the adapters."""
    return replace(adapters, memory_bytes=max(_MIN_DELTA_MEMORY, adapters.memory_bytes // 8))


def _implementation(
    settings: EngineSettings, dtype: torch.dtype, device: torch.device
) -> Implementation:
    """Raises EngineStartError for a device without its kernels: they are never replaced silently."""
    if settings.implementation == "reference":
        return "reference"
    if settings.implementation == "auto" and device.type == "cpu":
        return "cpu"
    if device.type == "cuda" and not torch.cuda.is_available():
        raise EngineStartError(f"device {settings.device!r}: torch sees no such device")
    reason = unavailable(dtype, device.type)
    if reason is not None:
        raise EngineStartError(f"device {settings.device!r}: {reason}")
    return "cuda"


def _engine_ops(
    implementation: Implementation, capabilities: Capabilities, device: torch.device
) -> EngineOps:
    if implementation == "reference":
        return ReferenceOps(capabilities)
    if implementation == "cuda":
        return CudaOps(capabilities, device)
    return CpuOps(capabilities)


def _lora_op(
    implementation: Implementation, dtype: torch.dtype, device: torch.device
) -> LoraChoice:
    if implementation == "reference":
        return LoraChoice(ReferenceLoraOp())
    if implementation == "cuda":
        return choose_cuda_lora_op(dtype, device)
    return choose_lora_op(dtype, device)


def _attention(
    cache: KVCacheConfig,
    num_heads: int,
    implementation: Implementation,
    capabilities: Capabilities,
) -> PagedAttention:
    try:
        return PagedAttention(cache, KVStorage(cache), num_heads, implementation, capabilities)
    except ValueError as error:
        raise EngineStartError(f"kv_dtype: {error}") from error


def _prefix_cache(
    settings: EngineSettings,
    cache: KVCacheConfig,
    pool: BlockPool,
    attention: PagedAttention,
    max_model_len: int,
) -> PrefixCache | None:
    """Held prefixes get half of the blocks, and never those that the longest sequence needs."""
    if not settings.prefix_cache:
        return None
    longest = -(-max_model_len // cache.block_size)
    return PrefixCache(
        pool,
        cache.block_size,
        cache.block_bytes,
        max_held_blocks=min(cache.num_blocks // 2, cache.num_blocks - longest),
        copy_block=attention.copy_block,
    )


def _cache_config(
    settings: EngineSettings, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> KVCacheConfig:
    cache = KVCacheConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=settings.block_size,
        num_blocks=0,
        dtype=dtype,
        device=device,
        eight_bits=settings.kv_dtype == "int8",
    )
    num_blocks = blocks_for_memory(cache, settings.kv_memory)
    if num_blocks < 1:
        raise EngineStartError(
            f"kv_memory of {settings.kv_memory} bytes holds no block: one has {cache.block_bytes}"
        )
    return replace(cache, num_blocks=num_blocks)


def _scheduler_config(
    settings: EngineSettings, config: DecoderConfig, cache: KVCacheConfig
) -> SchedulerConfig:
    wanted = settings.max_model_len or math.inf
    if math.inf > wanted > config.max_model_len:
        raise EngineStartError(
            f"max_model_len {wanted} is over the {config.max_model_len} tokens of the base"
        )
    held = cache.num_blocks * cache.block_size
    max_model_len = int(min(wanted, config.max_model_len, held))
    if max_model_len == held:
        logger.warning("kv_memory limits a sequence to %d tokens", held)
    return SchedulerConfig(
        token_budget=settings.token_budget,
        max_running=settings.max_running,
        queue_limit=settings.queue_limit,
        max_model_len=max_model_len,
        itl_target=settings.itl_target,
    )
