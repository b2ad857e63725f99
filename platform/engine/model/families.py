"""Reading each supported family's transformers config into a `DecoderConfig`.

Every field that a family's config class declares is either read here, or listed as without
meaning for inference, or must be at its default: a field nobody looked at never passes in silence.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from polyloom.platform.engine.model.config import Activation, DecoderConfig, LayerConfig
from polyloom.platform.engine.model.errors import (
    BaseNotFoundError,
    UnsupportedArchitectureError,
    UnsupportedConfigError,
)
from polyloom.platform.engine.model.rope import rope_config, rope_length_limit

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}

READ_FIELDS = frozenset(
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
        "rope_parameters",
        "architectures",
    ]
)
"""Read for every family."""

INERT_FIELDS = frozenset(
    [
        "initializer_range",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "attention_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "pretraining_tp",
        "transformers_version",
        "dtype",
        "chunk_size_feed_forward",
        "id2label",
        "label2id",
        "problem_type",
        "output_hidden_states",
        "return_dict",
        "max_window_layers",
        "no_rope_layer_interval",
        "original_max_position_embeddings",
        "use_sliding_window",
        "output_attentions",
    ]
)
"""Training, generation and bookkeeping, or folded by transformers into a field that is read."""


@dataclass(frozen=True)
class Family:
    """How one architecture departs from Llama.

    reads: config fields that `adapt` (or a flag below) takes into account, beside READ_FIELDS.
    adapt: changes the Llama reading of a config into the family's.
    """

    reads: frozenset[str] = frozenset()
    qkv_bias: bool | None = None
    typed_layers: bool = False
    typed_rope: bool = False
    partial_rotary: bool = False
    adapt: Callable[[DecoderConfig, PretrainedConfig], DecoderConfig] = field(
        default=lambda decoder, config: decoder
    )


def _gemma2(decoder: DecoderConfig, config: PretrainedConfig) -> DecoderConfig:
    if config.use_bidirectional_attention:
        raise UnsupportedConfigError(
            "use_bidirectional_attention", True, "only causal attention is supported"
        )
    return replace(
        decoder,
        norm_plus_one=True,
        sandwich_norms=True,
        embedding_scale=math.sqrt(config.hidden_size),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        attention_softcap=config.attn_logit_softcapping,
        logits_softcap=config.final_logit_softcapping,
    )


def _gemma3(decoder: DecoderConfig, config: PretrainedConfig) -> DecoderConfig:
    if config.attn_logit_softcapping is not None:
        raise UnsupportedConfigError(
            "attn_logit_softcapping", config.attn_logit_softcapping, "Gemma 3 has no such cap"
        )
    return replace(_gemma2(decoder, config), qk_norm=True)


def _granite(decoder: DecoderConfig, config: PretrainedConfig) -> DecoderConfig:
    return replace(
        decoder,
        embedding_scale=float(config.embedding_multiplier),
        attention_scale=float(config.attention_multiplier),
        residual_multiplier=float(config.residual_multiplier),
        logits_divisor=float(config.logits_scaling),
    )


def _smollm3(decoder: DecoderConfig, config: PretrainedConfig) -> DecoderConfig:
    return replace(
        decoder,
        layers=tuple(
            layer if rotates else replace(layer, rope=None)
            for layer, rotates in zip(decoder.layers, config.no_rope_layers, strict=False)
        ),
    )


_BIAS = frozenset({"attention_bias", "mlp_bias"})
_TYPED = frozenset({"layer_types", "sliding_window"})
_GEMMA = _TYPED | {
    "attention_bias",
    "hidden_activation",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "use_bidirectional_attention",
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(_BIAS),
    "MistralForCausalLM": Family(frozenset({"sliding_window"})),
    "Qwen2ForCausalLM": Family(_TYPED, qkv_bias=True, typed_layers=True),
    "Qwen3ForCausalLM": Family(
        _TYPED | {"attention_bias"},
        typed_layers=True,
        adapt=lambda decoder, config: replace(decoder, qk_norm=True),
    ),
    "Gemma2ForCausalLM": Family(_GEMMA, typed_layers=True, adapt=_gemma2),
    "Gemma3ForCausalLM": Family(_GEMMA, typed_layers=True, typed_rope=True, adapt=_gemma3),
    "Phi3ForCausalLM": Family(
        frozenset({"sliding_window"}),
        partial_rotary=True,
        adapt=lambda decoder, config: replace(decoder, fused_checkpoint=True),
    ),
    "GraniteForCausalLM": Family(
        _BIAS
        | {"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"},
        adapt=_granite,
    ),
    "SmolLM3ForCausalLM": Family(
        _TYPED | _BIAS | {"no_rope_layers"}, typed_layers=True, adapt=_smollm3
    ),
}


def read_config(folder: Path) -> DecoderConfig:
    """The decoder that a Hugging Face folder's `config.json` describes.

    Raises BaseNotFoundError without a readable config, UnsupportedArchitectureError,
    UnsupportedConfigError.
    """
    try:
        _refuse_unknown_architecture(json.loads((folder / "config.json").read_text()))
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise BaseNotFoundError(str(folder), f"no readable config.json: {error}") from error
    return decoder_config(config)


def _refuse_unknown_architecture(config: dict[str, object]) -> None:
    """Before transformers reads the config: it knows many architectures, but not all."""
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) else "(none)"
    if architecture not in FAMILIES:
        raise UnsupportedArchitectureError(str(architecture), tuple(FAMILIES))


def decoder_config(config: PretrainedConfig) -> DecoderConfig:
    """Read a transformers config; raises UnsupportedArchitectureError, UnsupportedConfigError."""
    _refuse_unknown_architecture({"architectures": config.architectures})
    architecture = config.architectures[0]
    family = FAMILIES[architecture]
    _refuse_unread_fields(config, family)
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    attention_bias = "attention_bias" in family.reads and bool(config.attention_bias)
    decoder = DecoderConfig(
        architecture=architecture,
        model_type=config.model_type,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=int(config.intermediate_size),
        num_heads=heads,
        num_kv_heads=int(config.num_key_value_heads),
        head_dim=head_dim,
        max_model_len=min(rope_length_limit(config, t) for t in _rope_types(config, family)),
        activation=_activation(config),
        norm_eps=float(config.rms_norm_eps),
        norm_plus_one=False,
        sandwich_norms=False,
        qk_norm=False,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias,
        mlp_bias="mlp_bias" in family.reads and bool(config.mlp_bias),
        fused_checkpoint=False,
        tied_head=bool(config.tie_word_embeddings),
        embedding_scale=1.0,
        attention_scale=head_dim**-0.5,
        attention_softcap=None,
        residual_multiplier=1.0,
        logits_divisor=1.0,
        logits_softcap=None,
        layers=_layers(config, family, head_dim),
    )
    return family.adapt(decoder, config)


def _refuse_unread_fields(config: PretrainedConfig, family: Family) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedConfigError(
            "quantization_config", config.quantization_config, "quantized weights do not load"
        )
    if not family.typed_layers and getattr(config, "layer_types", None) is not None:
        raise UnsupportedConfigError(
            "layer_types", config.layer_types, f"{config.model_type} layers are all alike"
        )
    known = READ_FIELDS | INERT_FIELDS | family.reads
    for declared in dataclasses.fields(type(config)):
        value = getattr(config, declared.name, None)
        if declared.name not in known and not _is_default(declared, value):
            raise UnsupportedConfigError(
                declared.name, value, f"not supported for {config.model_type}"
            )


def _is_default(declared: "dataclasses.Field[object]", value: object) -> bool:
    if declared.default_factory is not dataclasses.MISSING:
        return bool(value == declared.default_factory())
    return bool(value == declared.default)


def _activation(config: PretrainedConfig) -> Activation:
    name = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
    value = getattr(config, name)
    if value not in ACTIVATIONS:
        raise UnsupportedConfigError(name, value, f"supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def _rope_types(config: PretrainedConfig, family: Family) -> tuple[str | None, ...]:
    return tuple(dict.fromkeys(config.layer_types)) if family.typed_rope else (None,)


def _layers(config: PretrainedConfig, family: Family, head_dim: int) -> tuple[LayerConfig, ...]:
    count = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None) if "sliding_window" in family.reads else None
    types = config.layer_types if family.typed_layers else [None] * count
    if len(types) != count:
        raise UnsupportedConfigError("layer_types", types, f"{count} layers need {count} types")
    for layer_type in set(types) - {None, "full_attention", "sliding_attention"}:
        raise UnsupportedConfigError("layer_types", layer_type, "unknown kind of layer")
    ropes = {
        t: rope_config(config, head_dim, layer_type=t, partial=family.partial_rotary)
        for t in _rope_types(config, family)
    }
    return tuple(
        LayerConfig(
            rope=ropes[t if family.typed_rope else None],
            window=None if t == "full_attention" else window,
        )
        for t in types
    )
