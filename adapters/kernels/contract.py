"""The contract that every implementation of the LoRA gather op keeps.

    y[t] ← rows(y[t]) + Σ_p B_p (A_p x[t])

for every token t of a segment with an adapter, over the pages p of its revision, where

    rows(y) = gain ⊙ (y − bias) + bias + shift

for slots that have row vectors in the group, and y otherwise. Tokens of segments with slot −1 are
not touched, and what is outside a page's slice mask is not read.

x: [T, in];  y: [T, out], changed in place;  both in the pool's dtype.
A_p: [slices, 8, in];  B_p: [8, out];  gain, shift: [out] fp32;  bias: [out], the base linear's.
The sums are fp32 and y is rounded once.
"""

from typing import Protocol

import torch

from polyloom.adapters.base_layout import GroupShape
from polyloom.adapters.group_pool import GroupPool
from polyloom.adapters.segments import LoraBatch


class LoraOp(Protocol):
    """One implementation, with its own layout of a page."""

    @property
    def name(self) -> str:
        """`reference`, `cpu` or `cuda`."""
        ...

    def layer_elements(self, shape: GroupShape) -> int:
        """Elements that one layer of one page takes; a multiple of 64 bytes."""
        ...

    def pack(self, shape: GroupShape, a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> None:
        """Lay out one layer of one page.

        a: [slices, 8, in] fp32;  b: [8, out] fp32;  into: [layer_elements] of the pool's dtype.
        """
        ...

    def apply(
        self,
        pool: GroupPool,
        layer: int,
        x: torch.Tensor,
        y: torch.Tensor,
        batch: LoraBatch,
        bias: torch.Tensor | None,
    ) -> int:
        """Do the equation above; how many segments ran on matrix tiles."""
        ...
