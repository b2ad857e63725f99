"""A draft head's linears as a small base of its own: what deltas are paged and gathered by."""

from dataclasses import dataclass

from polyloom.adapters.base_layout import GroupShape, ModuleGroup, ModuleSlice
from polyloom.adapters.draft_heads.config import DraftHeadConfig

LINEARS = {
    "fc": ModuleGroup.FUSE,
    "gate_up_proj": ModuleGroup.GATE_UP,
    "down_proj": ModuleGroup.DOWN,
    "lm_head": ModuleGroup.HEAD,
}
"""Checkpoint names of the linears, in the order in which a step runs them. A delta may touch each;
`lm_head` (the base's own, on the draft vocabulary's rows) is not stored in a shared head."""


@dataclass(frozen=True)
class HeadLayout:
    """The linears of a shared head, as pages of deltas on it are laid out."""

    groups: tuple[GroupShape, ...]


def linear_sizes(config: DraftHeadConfig) -> dict[str, tuple[int, int]]:
    """Input and output features of each linear, as this head's own tensors have them."""
    hidden, width = config.hidden_size, config.intermediate_size
    return {
        "fc": (2 * hidden, hidden),
        "gate_up_proj": (hidden, 2 * width),
        "down_proj": (width, hidden),
        "lm_head": (hidden, config.draft_vocab_size),
    }


def head_layout(shared: DraftHeadConfig) -> HeadLayout:
    """One layer of each linear, each a single slice. The output has rows for an adapter's own
    tokens after the shared ones."""
    sizes = linear_sizes(shared)
    hidden, outputs = sizes["lm_head"]
    sizes["lm_head"] = hidden, outputs + shared.adapter_vocab_size
    return HeadLayout(
        tuple(
            GroupShape(LINEARS[name], 1, inputs, (ModuleSlice(name, 0, outputs),))
            for name, (inputs, outputs) in sizes.items()
        )
    )
