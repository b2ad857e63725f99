"""Launches of `attention.cu` as torch ops, and the names of its instantiations."""

from pathlib import Path

import numpy as np
import torch

from polyloom.kvcache.config import KVCacheConfig
from polyloom.kvcache.kernels.cuda import SCALAR_TYPES, Kernels, cuda_kernels, unavailable

SOURCE = Path(__file__).with_name("attention.cu")
_KEYS = 32
_WARPS = 4
_THREADS = 128
_MAX_DIM = 256


def kernel_names(dtype: torch.dtype) -> tuple[str, ...]:
    """Every instantiation for activations of `dtype`."""
    return tuple(
        dict.fromkeys(
            name
            for stored in (dtype, torch.int8)
            for dim in (_MAX_DIM // 2, _MAX_DIM)
            for name in _names(dtype, stored, dim)
        )
    )


def compile_kernels(config: KVCacheConfig) -> tuple[tuple[str, ...], float]:
    """Make what a cache of this shape uses ready; its instantiations, and the seconds it took."""
    names = _names(config.dtype, config.stored, config.head_dim)
    return names, cuda_kernels(SOURCE, names, config.device.type).compile(config.device)


def uncovered(config: KVCacheConfig, kind: str) -> str | None:
    """Why the kernels cannot serve a cache of this shape on devices of type `kind`; None if so."""
    reason = unavailable(config.dtype, kind)
    if reason is not None:
        return reason
    if config.head_dim % 16 or config.head_dim > _MAX_DIM:
        return f"head_dim {config.head_dim} is not a multiple of 16 up to {_MAX_DIM}"
    return None


def _names(dtype: torch.dtype, stored: torch.dtype, dim: int) -> tuple[str, ...]:
    """Instantiations for one engine's cache."""
    t = SCALAR_TYPES[dtype]
    s = "signed char" if stored is torch.int8 else t
    columns = 1 if dim <= _THREADS else 2
    return (
        f"kv_append<{t},{s}>",
        *(f"attend<{t},{s},{rows},{columns}>" for rows in _rows(dim)),
        f"attend_merge<{t}>",
        f"kv_gather<{t},{s}>",
        "kv_copy",
    )


def _rows(dim: int) -> tuple[int, ...]:
    """Rows of a block that the kernel exists for; more of wide heads would not fit registers."""
    return (4, 8, 16) if dim <= _THREADS else (4, 8)


def _kernels(dtype: torch.dtype, cache: torch.Tensor) -> tuple[Kernels, tuple[str, ...]]:
    names = _names(dtype, cache.dtype, cache.shape[-1])
    return cuda_kernels(SOURCE, names, cache.device.type), names


@torch.library.custom_op(
    "polyloom_cuda::kv_append", mutates_args=("q", "keys", "values", "key_scales", "value_scales")
)
def _kv_append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    kernels, names = _kernels(q.dtype, keys)
    heads, (tokens, kv_heads, dim) = q.shape[1], k.shape
    rotary = 0 if cos is None else cos.shape[-1]
    sizes = (heads, kv_heads, dim, rotary, keys.shape[2])
    kernels.launch(
        names[0],
        (tokens, -(-(heads + 2 * kv_heads) // _WARPS)),
        _THREADS,
        (
            *(q, k, v, keys, values, key_scales, value_scales, cos, sin, slots),
            *map(np.int32, sizes),
            *(np.int64(tensor.stride(0)) for tensor in (q, k, v)),
        ),
        q.device,
    )


@torch.library.custom_op("polyloom_cuda::attend", mutates_args=("out", "partial"))
def _attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    out: torch.Tensor,
    partial: torch.Tensor,
    sequences: torch.Tensor,
    compact: torch.Tensor,
    tables: torch.Tensor,
    token_of: torch.Tensor,
    max_count: int,
    splits: int,
    scale: float,
    window: int,
    softcap: float,
) -> None:
    kernels, names = _kernels(q.dtype, keys)
    heads, dim, kv_heads, block_size = q.shape[1], q.shape[2], keys.shape[1], keys.shape[2]
    wanted = max_count * (heads // kv_heads)
    choices = _rows(dim)
    rows = next((rows for rows in choices if rows >= wanted), choices[-1])
    kernels.launch(
        names[1 + choices.index(rows)],
        (len(sequences), kv_heads * -(-wanted // rows), splits),
        _THREADS,
        (
            *(out, partial, q, keys, values, key_scales, value_scales),
            *(sequences, compact, tables),
            *map(np.int32, (tables.shape[1], block_size, heads, kv_heads, dim, window)),
            np.float32(scale),
            np.float32(softcap),
            np.int32(len(token_of)),
            np.int64(q.stride(0)),
        ),
        q.device,
        4 * attention_shared_floats(rows, dim),
    )
    if splits > 1:
        kernels.launch(
            f"attend_merge<{SCALAR_TYPES[q.dtype]}>",
            (len(token_of), heads),
            _THREADS,
            (out, partial, token_of, *map(np.int32, (splits, heads, dim))),
            q.device,
        )


@torch.library.custom_op("polyloom_cuda::kv_gather", mutates_args=("keys_out", "values_out"))
def _kv_gather(
    keys_out: torch.Tensor,
    values_out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
    table: torch.Tensor,
) -> None:
    kernels, names = _kernels(keys_out.dtype, keys)
    kv_heads, length, dim = keys_out.shape
    kernels.launch(
        names[-2],
        (length, kv_heads),
        64,
        (
            *(keys_out, values_out, keys, values, key_scales, value_scales, table),
            *map(np.int32, (keys.shape[2], dim)),
        ),
        keys.device,
    )


@torch.library.custom_op("polyloom_cuda::kv_copy", mutates_args=("keys", "values"))
def _kv_copy(keys: torch.Tensor, values: torch.Tensor, pairs: torch.Tensor) -> None:
    kernels = cuda_kernels(SOURCE, ("kv_copy",), keys.device.type)
    layers, blocks = keys.shape[:2]
    words = keys[0, 0].numel() * keys.element_size() // 4
    kernels.launch(
        "kv_copy",
        (len(pairs), layers, 2),
        _THREADS,
        (keys, values, pairs, np.int32(blocks), np.int32(words)),
        keys.device,
    )


for _op in (_kv_append, _attend, _kv_gather, _kv_copy):
    _op.register_fake(lambda *_: None)


def attention_shared_floats(rows: int, dim: int) -> int:
    """Dynamic shared memory of `attend`: queries, scores, weights; maxima, sums and fixes."""
    width = _THREADS if dim <= _THREADS else _MAX_DIM
    return rows * width + rows * (_KEYS + 1) + _KEYS * rows + 3 * rows
