"""Sizes of the pools that hold resident revisions."""

from dataclasses import dataclass

import torch

PAGE_RANKS = 8
"""Ranks of A and B that one page holds, for all layers of its group."""


@dataclass(frozen=True)
class AdapterPoolConfig:
    """How much may be resident at once, and in what form.

    memory_bytes: budget of all pages and row vectors together.
    max_slots: revisions resident at once, whatever their size.
    max_rank: largest rank that a revision may have in any group.
    dtype: of A and B in the pages, and of the activations; row vectors are always fp32.
    """

    memory_bytes: int
    max_slots: int
    max_rank: int
    dtype: torch.dtype
    device: torch.device
