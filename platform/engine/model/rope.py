"""Rotary position embedding: inverse frequencies from a config, and the table a decoder reads.

The scaled kinds are computed by transformers' own functions, so they are its frequencies bit for
bit. Dynamic NTK and LongRoPE change every frequency once a sequence outgrows the original length,
which would make a cached key depend on how long its sequence has become: with them a context ends
at the original length, where both are constant.
"""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from polyloom.platform.engine.model.config import RopeConfig
from polyloom.platform.engine.model.errors import UnsupportedConfigError

SCALED_KINDS = ("linear", "yarn", "llama3", "dynamic", "longrope")


@dataclass(frozen=True)
class RopeParameters:
    """The fields of a config's `rope_parameters` that decide kind and length."""

    kind: str
    theta: float
    factor: float
    partial_rotary_factor: float
    original_length: int


def rope_parameters(config: PretrainedConfig, layer_type: str | None) -> RopeParameters:
    """Read `rope_parameters`, of one layer type where they are given by type (else None)."""
    given = config.rope_parameters or {}
    if layer_type is not None:
        given = given.get(layer_type) or {}
    if given.get("rope_type") is None or given.get("rope_theta") is None:
        raise UnsupportedConfigError("rope_parameters", given, "no rope_type and rope_theta")
    return RopeParameters(
        kind=str(given["rope_type"]),
        theta=float(given["rope_theta"]),
        factor=float(given.get("factor") or 1.0),
        partial_rotary_factor=float(given.get("partial_rotary_factor") or 1.0),
        original_length=int(
            given.get("original_max_position_embeddings") or config.max_position_embeddings
        ),
    )


def rope_config(
    config: PretrainedConfig, head_dim: int, *, layer_type: str | None, partial: bool
) -> RopeConfig:
    """Frequencies of one layer type (None where all layers share one set).

    partial: the family rotates only a part of each head if its config says so.
    Raises UnsupportedConfigError on an unknown kind, and on a partial rotation elsewhere.
    """
    parameters = rope_parameters(config, layer_type)
    if parameters.partial_rotary_factor != 1.0 and not partial:
        raise UnsupportedConfigError(
            "partial_rotary_factor",
            parameters.partial_rotary_factor,
            f"{config.model_type} rotates whole heads",
        )
    if parameters.kind == "default":
        dim = int(head_dim * parameters.partial_rotary_factor)
        exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
        return RopeConfig(tuple((1.0 / parameters.theta**exponents).tolist()), 1.0)
    if parameters.kind not in SCALED_KINDS:
        raise UnsupportedConfigError(
            "rope_type", parameters.kind, f"supported: default, {', '.join(SCALED_KINDS)}"
        )
    nested = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[parameters.kind](
        config, torch.device("cpu"), **nested
    )
    return RopeConfig(tuple(inv_freq.float().tolist()), float(attention_factor))


def rope_length_limit(config: PretrainedConfig, layer_type: str | None) -> int:
    """Longest context for which the frequencies are the same at every length."""
    parameters = rope_parameters(config, layer_type)
    length = int(config.max_position_embeddings)
    if parameters.kind in ("dynamic", "longrope"):
        return min(length, parameters.original_length)
    if parameters.kind == "yarn":
        return max(length, int(parameters.original_length * parameters.factor))
    return length


def rope_tables(
    rope: RopeConfig, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of every position below `length`, each `[length, 2 * pairs]` in `dtype`.

    Both halves of a row are alike, since dimension i rotates with dimension i + pairs. Computed in
    fp32 as transformers does, then rounded once.
    """
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float)
    angles = torch.arange(length, dtype=torch.float)[:, None] * inv_freq
    angles = torch.cat((angles, angles), dim=-1)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return cos.to(dtype), sin.to(dtype)
