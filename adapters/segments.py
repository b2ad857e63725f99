"""Which tokens of a step belong to which resident revision."""

from dataclasses import dataclass

import torch

from polyloom.adapters.base_layout import ModuleGroup


@dataclass(frozen=True)
class LoraBatch:
    """T packed tokens cut into G segments, each of one resident revision or of the base alone.

    The batcher orders sequences so that a revision has one segment a step where it can; the ops
    only need segments, not the order.

    starts: [G + 1] int32, segment g owns tokens `[starts[g], starts[g + 1])`.
    slots: [G] int32, the revision's slot (index of its row vectors), -1 for the base alone.
    pages: per group `[G, M]` int32, page ids of the segment's revision, padded with -1; a group that
        no segment touches is absent.
    rows: groups for which some slot in this batch has row terms (DoRA's gain, `lora_bias`).
    """

    starts: torch.Tensor
    slots: torch.Tensor
    pages: dict[ModuleGroup, torch.Tensor]
    rows: frozenset[ModuleGroup]

    @property
    def empty(self) -> bool:
        """No token of this step has an adapter."""
        return not self.pages and not self.rows
