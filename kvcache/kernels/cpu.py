"""The C++ paged attention: what it covers, and the call."""

from pathlib import Path

import torch

from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.config import KVCacheConfig
from polyloom.kvcache.kernels.build import load_cpu_ops

SOURCES = (Path(__file__).with_name("attention.cpp"),)
_LANES = 16
_MAX_HEAD_DIM = 256


def load(config: KVCacheConfig) -> str | None:
    """Make the op ready for caches of this shape; the reason if it cannot serve them."""
    if config.device.type != "cpu":
        return f"device {config.device.type}"
    if config.dtype not in (torch.float32, torch.bfloat16):
        return f"cache dtype {config.dtype}"
    if config.block_size % _LANES:
        return f"block_size {config.block_size} is not a multiple of {_LANES}"
    if config.head_dim % _LANES or config.head_dim > _MAX_HEAD_DIM:
        return f"head_dim {config.head_dim} is not a multiple of {_LANES} up to {_MAX_HEAD_DIM}"
    return load_cpu_ops("polyloom_kvcache", SOURCES)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Append k and v to a layer's cache and attend: `reference.append`, then `reference.attend`.

    The order of elements in keys and values is the op's own (see `attention.cpp`).
    """
    attended: torch.Tensor = torch.ops.polyloom_kvcache.paged_attention(
        q,
        k,
        v,
        keys,
        values,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.slot_mapping,
        scale,
        window or 0,
        softcap or 0.0,
    )
    return attended
