"""What is read from a config, and what is refused by name."""

import dataclasses
import json
from pathlib import Path

import pytest
from transformers import (
    AutoConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from polyloom.platform.engine.model.config import DecoderConfig
from polyloom.platform.engine.model.errors import (
    BaseNotFoundError,
    UnsupportedArchitectureError,
    UnsupportedConfigError,
)
from polyloom.platform.engine.model.families import (
    FAMILIES,
    INERT_FIELDS,
    READ_FIELDS,
    decoder_config,
    read_config,
)

ONLY_DECODERS = {"is_encoder_decoder"}
"""Must be at their default, for every family."""


def read(config: PretrainedConfig, architecture: str) -> DecoderConfig:
    config.architectures = [architecture]
    return decoder_config(config)


def config_class(architecture: str) -> type[PretrainedConfig]:
    names = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    model_type = "gemma3_text" if architecture == "Gemma3ForCausalLM" else names[architecture]
    return type(AutoConfig.for_model(model_type))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_declared_field_of_a_family_is_accounted_for(architecture: str) -> None:
    declared = {f.name for f in dataclasses.fields(config_class(architecture))}
    reads = FAMILIES[architecture].reads
    assert declared - READ_FIELDS - INERT_FIELDS - reads - ONLY_DECODERS == set()
    assert reads <= declared


def test_qwen2_windows_begin_at_max_window_layers() -> None:
    config = Qwen2Config(
        num_hidden_layers=4, use_sliding_window=True, sliding_window=7, max_window_layers=3
    )
    layers = read(config, "Qwen2ForCausalLM").layers
    assert [layer.window for layer in layers] == [None, None, None, 7]


def test_qwen2_window_is_off_unless_used() -> None:
    config = Qwen2Config(num_hidden_layers=4, sliding_window=7, max_window_layers=0)
    assert {layer.window for layer in read(config, "Qwen2ForCausalLM").layers} == {None}


def test_gemma3_layers_have_their_own_theta_and_window() -> None:
    config = Gemma3TextConfig(num_hidden_layers=7, sliding_window=9)
    layers = read(config, "Gemma3ForCausalLM").layers
    assert [layer.window for layer in layers] == [9, 9, 9, 9, 9, None, 9]
    local, distant = layers[0].rope, layers[5].rope
    assert local is not None and distant is not None
    assert local.inv_freq[1] > distant.inv_freq[1]


@pytest.mark.parametrize(
    ("config", "architecture", "limit"),
    [
        (LlamaConfig(max_position_embeddings=512), "LlamaForCausalLM", 512),
        (
            LlamaConfig(
                max_position_embeddings=512,
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
            ),
            "LlamaForCausalLM",
            512,
        ),
        (
            LlamaConfig(
                max_position_embeddings=512,
                rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
            ),
            "LlamaForCausalLM",
            2048,
        ),
        (
            Phi3Config(
                hidden_size=64,
                num_attention_heads=4,
                max_position_embeddings=4096,
                original_max_position_embeddings=128,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                },
            ),
            "Phi3ForCausalLM",
            128,
        ),
    ],
    ids=["default", "dynamic", "yarn", "longrope"],
)
def test_context_ends_where_frequencies_would_change(
    config: PretrainedConfig, architecture: str, limit: int
) -> None:
    assert read(config, architecture).max_model_len == limit


@pytest.mark.parametrize(
    ("config", "architecture", "field"),
    [
        (LlamaConfig(hidden_act="relu"), "LlamaForCausalLM", "hidden_act"),
        (Gemma2Config(hidden_activation="gelu"), "Gemma2ForCausalLM", "hidden_activation"),
        (
            Gemma2Config(use_bidirectional_attention=True),
            "Gemma2ForCausalLM",
            "use_bidirectional_attention",
        ),
        (
            Gemma3TextConfig(attn_logit_softcapping=5.0),
            "Gemma3ForCausalLM",
            "attn_logit_softcapping",
        ),
        (LlamaConfig(is_encoder_decoder=True), "LlamaForCausalLM", "is_encoder_decoder"),
        (LlamaConfig(quantization_config={"bits": 4}), "LlamaForCausalLM", "quantization_config"),
        (
            MistralConfig(layer_types=["full_attention"] * 32),
            "MistralForCausalLM",
            "layer_types",
        ),
        (
            Qwen3Config(num_hidden_layers=2, layer_types=["full_attention", "linear_attention"]),
            "Qwen3ForCausalLM",
            "layer_types",
        ),
        (
            LlamaConfig(rope_parameters={"rope_type": "proportional", "rope_theta": 1e4}),
            "LlamaForCausalLM",
            "rope_type",
        ),
        (
            Qwen2Config(
                rope_parameters={
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.5,
                }
            ),
            "Qwen2ForCausalLM",
            "partial_rotary_factor",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_by_field(config: PretrainedConfig, architecture: str, field: str) -> None:
    with pytest.raises(UnsupportedConfigError) as refusal:
        read(config, architecture)
    assert refusal.value.field == field
    assert field in str(refusal.value)


def test_other_architectures_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="GPT2LMHeadModel"):
        read(GPT2Config(), "GPT2LMHeadModel")


@pytest.mark.parametrize("model_type", ["nobody_knows_it", None])
def test_architectures_that_transformers_does_not_know_are_refused_by_name(
    tmp_path: Path, model_type: str | None
) -> None:
    config = {"architectures": ["NobodyForCausalLM"], "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitectureError, match="NobodyForCausalLM"):
        read_config(tmp_path)


def test_a_folder_without_a_config_is_not_a_base(tmp_path: Path) -> None:
    with pytest.raises(BaseNotFoundError, match=r"config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(BaseNotFoundError, match="no readable"):
        read_config(tmp_path)
