"""Attention of a chunk of a prompt over its gathered context, by torch.

A chunk is bound by arithmetic, not by reading: torch's scaled_dot_product_attention has flash kernels
on tensor cores for every device that is served, so there is none here.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right


def attend_chunk(
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
        return _capped(q, k, v, scale, window, softcap)
    mask = (
        causal_lower_right(count, context) if window is None else _seen(count, context, window, q)
    )
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True
    )  # fmt: skip
    return attended[0].transpose(0, 1).flatten(1)


def _capped(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float,
) -> torch.Tensor:
    """As `attend_chunk` with capped scores, which torch's attention has not: products, head by head."""
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
