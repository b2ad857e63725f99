"""Paged attention on CUDA devices: `attention.cu` for decode and verification, torch for prefill.

A sequence with up to `MAX_QUERIES` new tokens is attended to straight from its blocks. A longer
chunk is bound by arithmetic, not by reading: its context is gathered once and goes to torch's
scaled_dot_product_attention, which has flash kernels on tensor cores for every device that is served.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.attention.bias import causal_lower_right

from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.config import KVCacheConfig
from polyloom.kvcache.kernels.cuda import SCALAR_TYPES, Kernels, cuda_kernels, unavailable
from polyloom.kvcache.kernels.device_arrays import filled, to_device

SOURCE = Path(__file__).with_name("attention.cu")
MAX_QUERIES = 8
_KEYS = 32
_WARPS = 4
_THREADS = 128
_MAX_DIM = 256
_WANTED_BLOCKS = 528  # four on each of 132 processors
_CONTEXT_A_SPLIT = 256
_MAX_SPLITS = 64

Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AttentionPlan:
    """What one step's launches read, on the device. See `attention.cu` for the shapes.

    max_count: most new tokens of a sequence that is attended to from its blocks.
    prefill: (first token, tokens, context, row of the block tables) of each longer chunk.
    """

    sequences: torch.Tensor
    compact: torch.Tensor
    tables: torch.Tensor
    token_of: torch.Tensor
    slots: torch.Tensor
    max_count: int
    splits: int
    prefill: tuple[tuple[int, int, int, int], ...]


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


def engine_kernels(config: KVCacheConfig) -> tuple[str, ...]:
    """The instantiations that a cache of this shape uses."""
    return _names(config.dtype, config.dtype, config.head_dim)


def uncovered(config: KVCacheConfig, kind: str) -> str | None:
    """Why the kernels cannot serve a cache of this shape on devices of type `kind`; None if so."""
    reason = unavailable(config.dtype, kind)
    if reason is not None:
        return reason
    if config.head_dim % 16 or config.head_dim > _MAX_DIM:
        return f"head_dim {config.head_dim} is not a multiple of 16 up to {_MAX_DIM}"
    return None


@dataclass(frozen=True)
class AttentionFrame:
    """What a captured graph fixes of its plans: sizes, and the memory that they lie in.

    tokens: of a step, and so its most sequences.  blocks: of the longest context.  max_count, splits:
    as in `AttentionPlan`.  memory: uint8 on the device, `frame_bytes` long.
    """

    tokens: int
    blocks: int
    max_count: int
    splits: int
    memory: torch.Tensor


def attention_frame(
    tokens: int, blocks: int, block_size: int, max_count: int, device: torch.device
) -> AttentionFrame:
    """A frame for steps of up to `tokens` tokens over contexts of up to `blocks` blocks."""
    num_bytes = 4 * tokens * (4 + 1 + blocks + 1) + 8 * tokens + 5 * 16
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return AttentionFrame(tokens, blocks, max_count, _splits(tokens, blocks * block_size), memory)


def plan_attention(
    batch: AttentionBatch, device: torch.device, frame: AttentionFrame | None = None
) -> AttentionPlan:
    """Sort a step's sequences into those attended to from their blocks, and longer chunks.

    frame: lay the plan out in it, filled up with empty sequences and with tokens that go nowhere.
    """
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    sequences, compact, prefill = [], [], []
    token_of: list[int] = []
    for s, context in enumerate(contexts):
        first, count = starts[s], starts[s + 1] - starts[s]
        if count > MAX_QUERIES:
            prefill.append((first, count, context, s))
        elif count:
            sequences.append((first, count, context, s))
            compact.append(len(token_of))
            token_of += range(first, first + count)
    arrays: list[NDArray[Any]] = [
        np.array(sequences, dtype=np.int32).reshape(-1, 4),
        np.array(compact, dtype=np.int32),
        batch.block_tables.numpy(),
        np.array(token_of, dtype=np.int32),
        batch.slot_mapping.numpy(),
    ]
    if frame is None:
        longest = max((s[2] for s in sequences), default=0)
        max_count, splits = (
            max((s[1] for s in sequences), default=0),
            _splits(len(sequences), longest),
        )
        return AttentionPlan(*_tensors(arrays, device), max_count, splits, tuple(prefill))
    if prefill or starts[-1] > frame.tokens or arrays[2].shape[1] > frame.blocks:
        raise ValueError(f"a step of {starts[-1]} tokens does not fit a frame of {frame.tokens}")
    shapes = ((frame.tokens, 4), (frame.tokens,), (frame.tokens, frame.blocks), (frame.tokens,))
    padded = [
        filled(array, shape, value)
        for array, shape, value in zip(
            arrays, (*shapes, (frame.tokens,)), (0, 0, 0, -1, -1), strict=True
        )
    ]
    there = _tensors(padded, device, frame.memory)
    return AttentionPlan(*there, frame.max_count, frame.splits, ())


def append(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    slots: torch.Tensor,
    rotation: Rotation | None,
) -> None:
    """Rotate q in place and k on its way, and write k and v to a layer's cache.

    q [T, H, D], k, v [T, G, D]; keys, values [blocks, G, block_size, D] of their dtype or int8, then
    with scales [blocks, G, block_size] fp32; slots [T] int64 on the device, -1 for padding.
    """
    key_scales, value_scales = scales or (None, None)
    cos, sin = rotation or (None, None)
    torch.ops.polyloom_cuda.kv_append(
        q, k, v, keys, values, key_scales, value_scales, cos, sin, slots
    )


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """`reference.attend` over caches as `append` fills them: [T, H * D]."""
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads * dim, dtype=q.dtype, device=q.device)
    if len(plan.sequences):
        partial_splits = plan.splits if plan.splits > 1 else 0
        partial = torch.empty(
            partial_splits * len(plan.token_of) * heads * (dim + 2),
            dtype=torch.float32,
            device=q.device,
        )
        key_scales, value_scales = scales or (None, None)
        torch.ops.polyloom_cuda.attend(
            q,
            keys,
            values,
            key_scales,
            value_scales,
            out,
            partial,
            plan.sequences,
            plan.compact,
            plan.tables,
            plan.token_of,
            plan.max_count,
            plan.splits,
            scale,
            window or 0,
            softcap or 0.0,
        )
    for first, count, context, row in plan.prefill:
        k, v = gather(keys, values, scales, plan.tables[row], context, q.dtype)
        attended = _prefill(q[first : first + count], k, v, scale, window, softcap)
        out[first : first + count] = attended
    return out


def gather(
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor] | None,
    table: torch.Tensor,
    length: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `length` tokens of one sequence's context, `[G, length, D]` each of `dtype`."""
    shape = (keys.shape[1], length, keys.shape[3])
    k, v = (torch.empty(shape, dtype=dtype, device=keys.device) for _ in range(2))
    key_scales, value_scales = scales or (None, None)
    torch.ops.polyloom_cuda.kv_gather(k, v, keys, values, key_scales, value_scales, table)
    return k, v


def copy_blocks(keys: torch.Tensor, values: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy blocks (from, to) of all layers, K and V; keys, values [layers, blocks, …]."""
    on_device = torch.tensor(list(pairs), dtype=torch.int32).to(keys.device)
    torch.ops.polyloom_cuda.kv_copy(keys, values, on_device)


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of the last n tokens of a context: q [n, H, D]; k, v [G, L, D]; [n, H * D]."""
    count, context = q.shape[0], k.shape[1]
    if softcap is not None:
        return _prefill_capped(q, k, v, scale, window, softcap)
    mask = (
        causal_lower_right(count, context) if window is None else _seen(count, context, window, q)
    )
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True
    )  # fmt: skip
    return attended[0].transpose(0, 1).flatten(1)


def _prefill_capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float,
) -> torch.Tensor:
    """As `_prefill` with capped scores, which torch's attention has not: products, head by head."""
    count, heads, dim = q.shape
    grouped = q.transpose(0, 1).reshape(k.shape[0], -1, dim)  # [G, group * n, D]
    scores = (grouped @ k.transpose(1, 2)).float() * scale
    scores = (torch.tanh(scores / softcap) * softcap).view(heads, count, -1)
    scores.masked_fill_(~_seen(count, k.shape[1], window, q), float("-inf"))
    weights = scores.softmax(-1).to(q.dtype).view(grouped.shape[0], grouped.shape[1], -1)
    return (weights @ v).view(heads, count, dim).transpose(0, 1).flatten(1)


def _seen(count: int, context: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """[count, context]: which cached positions each of the last `count` tokens attends to."""
    key = torch.arange(context, device=like.device)
    query = key[context - count :, None]
    causal = key <= query
    return causal if window is None else causal & (key > query - window)


def _splits(sequences: int, longest: int) -> int:
    """Into how many parts each context is split, so that few long ones still fill a device."""
    if sequences == 0:
        return 1
    wanted = -(-_WANTED_BLOCKS // sequences)
    return max(1, min(wanted, longest // _CONTEXT_A_SPLIT, _MAX_SPLITS))


def _tensors(
    arrays: Sequence[NDArray[Any]], device: torch.device, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    sequences, compact, tables, token_of, slots = to_device(arrays, device, into)
    return sequences, compact, tables, token_of, slots


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
