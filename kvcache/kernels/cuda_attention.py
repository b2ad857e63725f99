"""Paged attention on CUDA devices: `attention.cu` for decode and verification, torch for prefill.

A sequence with up to `MAX_QUERIES` new tokens is attended to straight from its blocks. The context of
a longer chunk is gathered once and goes to `prefill_attention`.
"""

from collections.abc import Sequence

import torch

import polyloom.kvcache.kernels.cuda_attention_ops  # noqa: F401 (registers the ops)
from polyloom.kvcache.kernels.cuda_attention_plan import AttentionPlan
from polyloom.kvcache.kernels.prefill_attention import attend_chunk

Rotation = tuple[torch.Tensor, torch.Tensor]


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
        attended = attend_chunk(q[first : first + count], k, v, scale, window, softcap)
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
