"""Rotary position embedding: inverse frequencies from a config, and the table a decoder reads.

The scaled kinds are computed by transformers' own functions, so they are its frequencies bit for
bit. Dynamic NTK and LongRoPE change every frequency once a sequence outgrows the original length,
which would make a cached key depend on how long its sequence has become: with them a context ends
at the original length, where both are constant.
"""

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from polyloom.platform.engine.model.config import RopeConfig
from polyloom.platform.engine.model.errors import UnsupportedConfigError

SCALED_KINDS = ("linear", "yarn", "llama3", "dynamic", "longrope")


def rope_config(
    config: PretrainedConfig, head_dim: int, *, layer_type: str | None, partial: bool
) -> RopeConfig:
    """Frequencies of one layer type (None where all layers share one set).

    partial: the family rotates only a part of each head if its config says so.
    Raises UnsupportedConfigError on an unknown kind, and on a partial rotation elsewhere.
    """
    parameters = rope_parameters(config, layer_type)
    kind = str(parameters["rope_type"])
    factor = float(parameters.get("partial_rotary_factor") or 1.0)
    if factor != 1.0 and not partial:
        raise UnsupportedConfigError(
            "partial_rotary_factor", factor, f"{config.model_type} rotates whole heads"
        )
    if kind == "default":
        dim = int(head_dim * factor)
        exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
        return RopeConfig(tuple((1.0 / parameters["rope_theta"] ** exponents).tolist()), 1.0)
    if kind not in SCALED_KINDS:
        raise UnsupportedConfigError("rope_type", kind, "this RoPE scaling is not supported")
    nested = {} if layer_type is None else {"layer_type": layer_type}
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **nested)
    return RopeConfig(tuple(inv_freq.float().tolist()), float(attention_factor))


def rope_length_limit(config: PretrainedConfig, layer_type: str | None) -> int:
    """Longest context for which the frequencies are the same at every length."""
    parameters = rope_parameters(config, layer_type)
    kind, length = parameters["rope_type"], int(config.max_position_embeddings)
    original = int(parameters.get("original_max_position_embeddings") or length)
    if kind in ("dynamic", "longrope"):
        return min(length, original)
    if kind == "yarn":
        return max(length, int(original * (parameters.get("factor") or 1.0)))
    return length


def rope_parameters(config: PretrainedConfig, layer_type: str | None) -> dict[str, object]:
    """The config's `rope_parameters`, of one layer type where they are given by type."""
    parameters: dict[str, object] = config.rope_parameters or {}
    if layer_type is not None:
        nested = parameters.get(layer_type)
        parameters = nested if isinstance(nested, dict) else {}
    if "rope_type" not in parameters or "rope_theta" not in parameters:
        raise UnsupportedConfigError("rope_parameters", parameters, "no rope_type and rope_theta")
    return parameters


def rope_table(rope: RopeConfig, length: int, dtype: torch.dtype) -> torch.Tensor:
    """`[length, 2, pairs]` in `dtype`: cosines and sines of every position below `length`.

    Computed in fp32 as transformers does, then rounded once.
    """
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float)
    angles = torch.arange(length, dtype=torch.float)[:, None] * inv_freq
    table = torch.stack((angles.cos(), angles.sin()), dim=1) * rope.attention_factor
    return table.to(dtype)
