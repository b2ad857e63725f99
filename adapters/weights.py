"""A revision's tensors in the form that residency loads: by group, layer and output rows."""

from dataclasses import dataclass
from typing import Protocol

import torch

from polyloom.adapters.base_layout import ModuleGroup


@dataclass(frozen=True)
class LoraTerm:
    """One rank term on rows `[offset, offset + out)` of a group's fused linear in one layer.

    `y[offset:offset+out] += b @ (a @ x)`; the scale (and DoRA's magnitude ratio) is folded into b.

    a: [rank, in] fp32;  b: [out, rank] fp32.
    """

    group: ModuleGroup
    layer: int
    offset: int
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class RowTerm:
    """What is not a rank term, on the same rows: `y = gain * (W x) + shift + …`.

    gain: [out] fp32 or None, DoRA's m / ‖W + s·B·A‖ applied to the base's product before its bias.
    shift: [out] fp32 or None, `lora_bias` with its scale.
    """

    group: ModuleGroup
    layer: int
    offset: int
    gain: torch.Tensor | None
    shift: torch.Tensor | None


@dataclass(frozen=True)
class AdapterWeights:
    """Everything a resident revision applies."""

    digest: str
    terms: tuple[LoraTerm, ...]
    rows: tuple[RowTerm, ...]

    def rank(self, group: ModuleGroup) -> int:
        """Largest rank that this revision has in `group`, over layers and slices; 0 if untouched."""
        return max((t.a.shape[0] for t in self.terms if t.group is group), default=0)


class BaseWeights(Protocol):
    """Read access to the base's own weights, which DoRA's norms need. Implemented by the engine."""

    def rows(self, group: ModuleGroup, layer: int, offset: int, out_features: int) -> torch.Tensor:
        """The base's `[out_features, in_features]` weight rows of a group, as fp32."""
        ...
