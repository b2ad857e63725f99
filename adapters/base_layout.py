"""What the adapter code must know of a base: which linear modules it has, and their shapes.

The engine fuses linears that read the same input (q, k, v; gate, up). A *group* is one such fused
linear, a *slice* the part of its output that one original module writes. A checkpoint that stores
modules fused already (Phi-3's `qkv_proj`) names several slices at once.
"""

from dataclasses import dataclass
from enum import StrEnum


class ModuleGroup(StrEnum):
    """The fused linears of a decoder layer, the output head, and what a draft head has besides:
    the linear that fuses hidden state and embedding."""

    QKV = "qkv"
    OUT = "out"
    GATE_UP = "gate_up"
    DOWN = "down"
    HEAD = "head"
    FUSE = "fuse"


@dataclass(frozen=True)
class ModuleSlice:
    """The output rows `[offset, offset + out_features)` of a group's fused linear."""

    name: str
    offset: int
    out_features: int


@dataclass(frozen=True)
class GroupShape:
    """One fused linear: `y[out_features] = W[out_features, in_features] x`, in each of `layers`."""

    group: ModuleGroup
    layers: int
    in_features: int
    slices: tuple[ModuleSlice, ...]

    @property
    def out_features(self) -> int:
        return sum(s.out_features for s in self.slices)


@dataclass(frozen=True)
class CheckpointModule:
    """A linear as the checkpoint (and so PEFT) names it, and the rows of a group it fills.

    `path` is relative to the layer (`self_attn.q_proj`), or to the model for the head (`lm_head`).
    """

    path: str
    group: ModuleGroup
    offset: int
    out_features: int
    in_features: int
    has_bias: bool


@dataclass(frozen=True)
class BaseLayout:
    """The adapter-facing description of one base at one digest.

    other_names: what else an adapter's config may call it, beside `name`.
    """

    name: str
    digest: str
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    tied_head: bool
    layer_prefix: str
    groups: tuple[GroupShape, ...]
    modules: tuple[CheckpointModule, ...]
    other_names: tuple[str, ...] = ()

    def group(self, group: ModuleGroup) -> GroupShape:
        """The shape of `group`; every base has all of them but FUSE."""
        return next(g for g in self.groups if g.group is group)
