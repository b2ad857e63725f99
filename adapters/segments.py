"""Which tokens of a step belong to which resident revision."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from polyloom.adapters.base_layout import ModuleGroup
from polyloom.adapters.placement import Allocation


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


def lora_batch(segments: Sequence[tuple[Allocation | None, int]]) -> LoraBatch:
    """Describe segments by where their revisions lie; None is the base alone.

    Neighbours of one revision become one segment, so its pages are read once.
    """
    merged: list[tuple[Allocation | None, int]] = []
    for allocation, num_tokens in segments:
        if merged and merged[-1][0] is allocation:
            num_tokens += merged.pop()[1]
        merged.append((allocation, num_tokens))
    allocations = [allocation for allocation, _ in merged]
    resident = [allocation for allocation in allocations if allocation is not None]
    starts = [0, *accumulate(num_tokens for _, num_tokens in merged)]
    slots = [-1 if allocation is None else allocation.slot for allocation in allocations]
    return LoraBatch(
        starts=torch.tensor(starts, dtype=torch.int32),
        slots=torch.tensor(slots, dtype=torch.int32),
        pages={
            group: _page_table(group, allocations)
            for group in sorted({group for a in resident for group in a.pages})
        },
        rows=frozenset(group for a in resident for group in a.need.rows),
    )


def _page_table(group: ModuleGroup, allocations: Sequence[Allocation | None]) -> torch.Tensor:
    """`[G, M]` int32 page ids, -1 where a segment has no more."""
    ids = [() if a is None else a.pages.get(group, ()) for a in allocations]
    width = max(len(row) for row in ids)
    table = [[*row, *[-1] * (width - len(row))] for row in ids]
    return torch.tensor(table, dtype=torch.int32)
