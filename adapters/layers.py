"""What a decoder holds to let adapters act: one call after each fused linear."""

import torch

from polyloom.adapters.base_layout import ModuleGroup
from polyloom.adapters.kernels.choice import LoraChoice
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.segments import LoraBatch
from polyloom.kvcache.kernels.dispatch import Capabilities


class LoraLayers:
    """Applies a batch's revisions to the outputs of fused linears.

    Ledgers: `<name>` counts calls that had work; `<name>_tiles` segments that ran on matrix
    units.
    """

    def __init__(
        self,
        pages: AdapterPages,
        choice: LoraChoice,
        capabilities: Capabilities,
        name: str = "lora",
    ) -> None:
        """choice: its op is the one that `pages` were built with."""
        self._pools = pages.pools
        self._op = choice.op
        self._fallback_reason = choice.fallback_reason
        self._ledger = capabilities.register(
            name, choice.op.name, choice.why, choice.kernels, choice.compile_seconds
        )
        owner, which = choice.matrix or (choice.op.name, "none has matrix units")
        self._tiles = capabilities.register(f"{name}_tiles", owner, which)

    def apply(
        self,
        group: ModuleGroup,
        layer: int,
        x: torch.Tensor,
        y: torch.Tensor,
        batch: LoraBatch,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Add to `y` what the batch's revisions do to this linear; see `kernels.contract`.

        x: [T, in], the linear's input;  y: [T, out], its output, changed in place;  bias: [out],
        what the linear added, which DoRA must leave alone.  The head is layer 0 of its group, and
        its batch describes the tokens that are given to it.
        """
        if group not in batch.pages and group not in batch.rows:
            return
        if self._fallback_reason is not None:
            self._ledger.fell_back(self._fallback_reason)
        self._ledger.engaged += 1
        self._tiles.engaged += self._op.apply(self._pools[group], layer, x, y, batch, bias)
