"""Paged attention in plain torch: the contract that the other implementations are held to.

Within a (layer, block, head) elements lie as `[block_size, head_dim]`.
"""

import torch

from polyloom.kvcache.batch import AttentionBatch


def append(
    keys: torch.Tensor,
    values: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write the step's k and v `[T, G, D]` to a layer's `[blocks, G, block_size, D]`."""
    block_size = keys.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    keys[blocks, :, offsets] = k
    values[blocks, :, offsets] = v


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """softmax(mask(cap(scale · q kᵀ))) v in fp32, sequence by sequence.

    q: [T, H, D]; keys, values: `[blocks, G, block_size, D]`, the step's own tokens included; head
    `h` reads KV head `h // (H / G)`. A token at position p sees positions in `(p - window, p]`.
    Returns [T, H * D] in q's dtype.
    """
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    out = torch.empty(tokens, num_heads, head_dim, dtype=q.dtype, device=q.device)
    starts = batch.query_starts.tolist()
    for s, context_len in enumerate(batch.context_lens.tolist()):
        own = slice(starts[s], starts[s + 1])
        k = _context(keys, batch.block_tables[s], context_len)
        v = _context(values, batch.block_tables[s], context_len)
        queries = q[own].float().reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        scores = torch.einsum("tgrd,gld->tgrl", queries, k) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        visible = _visible(batch.positions[own], context_len, window)
        scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
        attended = torch.einsum("tgrl,gld->tgrd", scores.softmax(-1), v)
        out[own] = attended.flatten(1, 2).to(q.dtype)
    return out.flatten(1)


def _context(cache: torch.Tensor, table: torch.Tensor, context_len: int) -> torch.Tensor:
    """A sequence's cached tokens as `[G, context_len, D]` fp32."""
    block_size = cache.shape[2]
    blocks = table[: -(-context_len // block_size)].long()
    return cache[blocks].transpose(0, 1).flatten(1, 2)[:, :context_len].float()


def _visible(positions: torch.Tensor, context_len: int, window: int | None) -> torch.Tensor:
    """[T, context_len]: which cached positions each token attends to."""
    query = positions[:, None]
    key = torch.arange(context_len, device=positions.device)[None, :]
    causal = key <= query
    return causal if window is None else causal & (key > query - window)
