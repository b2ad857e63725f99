"""Builds a draft model from its folder: weights, and a cache as large as is useful."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from polyloom.kvcache.attention import PagedAttention
from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.config import KVCacheConfig, blocks_for_memory
from polyloom.kvcache.manager import KVCacheManager
from polyloom.kvcache.storage import KVStorage
from polyloom.platform.engine.errors import EngineStartError
from polyloom.platform.engine.kernels.ops import EngineOps
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.weights import FusedWeights
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.speculation.draft_model import DraftModel
from polyloom.platform.engine.speculation.same_tokenizer import check_same_tokenizer

MakeAttention = Callable[[KVCacheConfig, KVStorage, int], PagedAttention]
"""From a cache's shape, its memory and the number of query heads."""

MEMORY_SHARE = 4
"""The draft model's cache gets one part in so many of the target's memory, beside it."""


def load_draft_model(
    settings: EngineSettings, folder: Path, ops: EngineOps, make_attention: MakeAttention
) -> DraftModel:
    """The model of `folder` with a cache of its own.

    Raises:
        EngineStartError: it has another tokenizer or vocabulary than the base, or no block fits.
        ModelError: it cannot be served.
    """
    base = Path(settings.model_folder)
    check_same_tokenizer(base, folder)
    config, target = read_config(folder), read_config(base)
    if config.vocab_size != target.vocab_size:
        raise EngineStartError(
            f"draft_model {str(folder)!r} has {config.vocab_size} tokens, "
            f"the base has {target.vocab_size}"
        )
    dtype, device = getattr(torch, settings.dtype), torch.device(settings.device)
    shape = KVCacheConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=settings.block_size,
        num_blocks=0,
        dtype=dtype,
        device=device,
    )
    num_blocks = blocks_for_memory(shape, settings.kv_memory // MEMORY_SHARE)
    if num_blocks < 1:
        raise EngineStartError(
            f"kv_memory of {settings.kv_memory} bytes leaves the draft model none"
        )
    cache = replace(shape, num_blocks=num_blocks)
    decoder = Decoder(config, FusedWeights(folder, config, dtype, device), ops, dtype)
    attention = make_attention(cache, KVStorage(cache), config.num_heads)
    blocks = KVCacheManager(BlockPool(num_blocks), cache.block_size)
    return DraftModel(decoder, attention, blocks, cache.block_size, device)
