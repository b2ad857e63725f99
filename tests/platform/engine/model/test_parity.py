"""Every family and RoPE scaling: our logits are transformers', packed, ragged, chunked, paged."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from polyloom.platform.engine.model.config import Activation, DecoderConfig, RopeConfig
from polyloom.platform.engine.model.families import read_config

VOCABULARY = 97
LENGTHS = (1, 7, 26, 15)
TOLERANCE = 3e-5
"""Largest difference of an fp32 logit; logits of these models reach about 5."""

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONG_FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 5.0, 6.0, 7.0]}


def scaled(kind: str, **parameters: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 1000.0, **parameters}


CASES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama-biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-mha-wide-heads": lambda: LlamaConfig(
        **{**SIZES, "num_key_value_heads": 4, "head_dim": 20}
    ),
    "llama-theta": lambda: LlamaConfig(**SIZES, rope_parameters=scaled("default")),
    "llama-linear": lambda: LlamaConfig(**SIZES, rope_parameters=scaled("linear", factor=4.0)),
    "llama-yarn": lambda: LlamaConfig(
        **SIZES,
        rope_parameters=scaled("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "llama-yarn-mscale": lambda: LlamaConfig(
        **SIZES,
        rope_parameters=scaled(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=0.7,
            mscale_all_dim=1.3,
            beta_fast=8.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
    "llama-llama3": lambda: LlamaConfig(
        **SIZES,
        rope_parameters=scaled(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama-dynamic": lambda: LlamaConfig(**SIZES, rope_parameters=scaled("dynamic", factor=4.0)),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**SIZES, sliding_window=9),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2-window": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=2
    ),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=True),
    "qwen3-biases": lambda: Qwen3Config(**SIZES, head_dim=12, attention_bias=True),
    "gemma2": lambda: Gemma2Config(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=6,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
    ),
    "gemma2-uncapped": lambda: Gemma2Config(
        **SIZES, head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": scaled("linear", factor=8.0),
        },
    ),
    "phi3": lambda: Phi3Config(**SIZES, sliding_window=11),
    "phi3-partial": lambda: Phi3Config(
        **SIZES,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "phi3-longrope": lambda: Phi3Config(
        **{**SIZES, "max_position_embeddings": 256},
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": 1.0,
            **LONG_FACTORS,
        },
    ),
    "granite": lambda: GraniteConfig(
        **SIZES,
        tie_word_embeddings=True,
        embedding_multiplier=6.0,
        logits_scaling=3.0,
        residual_multiplier=0.22,
        attention_multiplier=0.11,
    ),
    "granite-biases": lambda: GraniteConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "smollm3": lambda: SmolLM3Config(
        **SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=6
    ),
}


RunMaker = Callable[[Path, DecoderConfig, int], Any]


@dataclass(frozen=True)
class Case:
    """A random model on disk, and transformers' logits of PROMPTS on it."""

    folder: Path
    reference: list[torch.Tensor]


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


PROMPTS = _prompts()


@pytest.fixture(scope="session")
def make_case(
    save_random_model: Callable[[PretrainedConfig], Path],
    reference_logits: Callable[[Path, Sequence[Sequence[int]]], list[torch.Tensor]],
) -> Callable[[str], Case]:
    @functools.cache
    def make(name: str) -> Case:
        folder = save_random_model(CASES[name]())
        return Case(folder, reference_logits(folder, PROMPTS))

    return make


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, make_case: Callable[[str], Case]) -> Case:
    return make_case(request.param)


def largest_difference(ours: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    return max(
        (mine - theirs).abs().max().item() for mine, theirs in zip(ours, reference, strict=True)
    )


def test_ragged_prompts_in_one_batch(case: Case, paged_run: RunMaker) -> None:
    run = paged_run(case.folder, read_config(case.folder), len(PROMPTS))
    assert largest_difference(run.step(PROMPTS), case.reference) <= TOLERANCE


def test_chunked_prefill_and_decode_steps(case: Case, paged_run: RunMaker) -> None:
    """Sequences join late, advance by unequal chunks and then token by token, all in one batch."""
    run = paged_run(case.folder, read_config(case.folder), len(PROMPTS))
    parts: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    for step in range(max(LENGTHS)):
        chunks = [
            prompt[done : done + (s + 1 if step < 4 else 1)] if step >= s else []
            for s, (prompt, done) in enumerate(zip(PROMPTS, run.lengths, strict=True))
        ]
        if any(chunks):
            for part, logits in zip(parts, run.step(chunks), strict=True):
                part.append(logits)
    assert run.lengths == list(LENGTHS)
    assert largest_difference([torch.cat(part) for part in parts], case.reference) <= TOLERANCE


def without_windows(config: DecoderConfig) -> DecoderConfig:
    return replace(config, layers=tuple(replace(layer, window=None) for layer in config.layers))


def one_token_wider(config: DecoderConfig) -> DecoderConfig:
    layers = tuple(replace(x, window=x.window and x.window + 1) for x in config.layers)
    return replace(config, layers=layers)


def other_theta(config: DecoderConfig) -> DecoderConfig:
    def turned(rope: RopeConfig) -> RopeConfig:
        return replace(rope, inv_freq=tuple(f**1.01 for f in rope.inv_freq))

    layers = tuple(replace(x, rope=turned(x.rope)) if x.rope else x for x in config.layers)
    return replace(config, layers=layers)


FAULTS: dict[str, tuple[str, Callable[[DecoderConfig], DecoderConfig]]] = {
    "theta": ("llama", other_theta),
    "eps": ("llama", lambda c: replace(c, norm_eps=c.norm_eps * 100)),
    "no window": ("mistral-window", without_windows),
    "wider window": ("qwen2-window", one_token_wider),
    "attention cap": ("gemma2", lambda c: replace(c, attention_softcap=None)),
    "logits cap": ("gemma2", lambda c: replace(c, logits_softcap=None)),
    "query scale": ("gemma2", lambda c: replace(c, attention_scale=c.head_dim**-0.5)),
    "plus one": ("gemma3", lambda c: replace(c, norm_plus_one=False)),
    "embedding scale": ("gemma3", lambda c: replace(c, embedding_scale=1.0)),
    "activation": ("gemma2", lambda c: replace(c, activation=Activation.SILU)),
    "residual": ("granite", lambda c: replace(c, residual_multiplier=0.23)),
    "logits divisor": ("granite", lambda c: replace(c, logits_divisor=2.9)),
    "rope everywhere": (
        "smollm3",
        lambda c: replace(c, layers=tuple(replace(x, rope=c.layers[0].rope) for x in c.layers)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(
    fault: str, make_case: Callable[[str], Case], paged_run: RunMaker
) -> None:
    """The comparison has teeth: each wrong constant is far outside the tolerance."""
    name, plant = FAULTS[fault]
    case = make_case(name)
    run = paged_run(case.folder, plant(read_config(case.folder)), len(PROMPTS))
    assert largest_difference(run.step(PROMPTS), case.reference) > 10 * TOLERANCE
