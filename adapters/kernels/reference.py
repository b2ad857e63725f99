"""The LoRA gather op in plain torch: the contract, made executable."""

import torch

from polyloom.adapters.base_layout import GroupShape
from polyloom.adapters.config import PAGE_RANKS
from polyloom.adapters.group_pool import GroupPool
from polyloom.adapters.segments import LoraBatch

_ALIGNMENT = 64


class ReferenceLoraOp:
    """A layer of a page is A `[slices, 8, in]`, then B `[8, out]`, then padding to 64 elements."""

    name = "reference"

    def layer_elements(self, shape: GroupShape) -> int:
        elements = PAGE_RANKS * (len(shape.slices) * shape.in_features + shape.out_features)
        return -(-elements // _ALIGNMENT) * _ALIGNMENT

    def pack(self, shape: GroupShape, a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> None:
        into[: a.numel()] = a.flatten()
        into[a.numel() : a.numel() + b.numel()] = b.flatten()

    def apply(
        self,
        pool: GroupPool,
        layer: int,
        x: torch.Tensor,
        y: torch.Tensor,
        batch: LoraBatch,
        bias: torch.Tensor | None,
    ) -> int:
        starts = batch.starts.tolist()
        pages = batch.pages.get(pool.shape.group)
        for index, slot in enumerate(batch.slots.tolist()):
            if slot < 0:
                continue
            tokens = slice(starts[index], starts[index + 1])
            result = _rows(pool.rows[slot], layer, y[tokens].float(), bias)
            for page_id in [] if pages is None else pages[index].tolist():
                if page_id >= 0:
                    result += _page_term(pool, page_id, layer, x[tokens].float())
            y[tokens] = result.to(y.dtype)
        return 0


def _rows(
    rows: torch.Tensor | None, layer: int, y: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`gain ⊙ (y − bias) + bias + shift`, or y if the slot has no row vectors. y: [T, out] fp32."""
    if rows is None:
        return y
    gain, shift = rows[layer].unbind()
    base_bias = torch.zeros_like(shift) if bias is None else bias.float()
    result: torch.Tensor = gain * (y - base_bias) + base_bias + shift
    return result


def _page_term(pool: GroupPool, page_id: int, layer: int, x: torch.Tensor) -> torch.Tensor:
    """`B_p (A_p x)`: [T, out] fp32, zero on slices that the page does not touch."""
    shape = pool.shape
    packed = pool.page(page_id)[layer].float()
    size_a = len(shape.slices) * PAGE_RANKS * shape.in_features
    a = packed[:size_a].view(len(shape.slices), PAGE_RANKS, shape.in_features)
    b = packed[size_a : size_a + PAGE_RANKS * shape.out_features].view(PAGE_RANKS, -1)
    mask = int(pool.masks[page_id, layer])
    term = x.new_zeros(x.shape[0], shape.out_features)
    for index, part in enumerate(shape.slices):
        if mask >> index & 1:
            rows = slice(part.offset, part.offset + part.out_features)
            term[:, rows] = (x @ a[index].T) @ b[:, rows]
    return term
