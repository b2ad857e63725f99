"""Tiny bases on disk, and real PEFT adapters of them."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from polyloom.adapters.validation import ValidationLimits, validate
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.layout import base_layout
from polyloom.platform.engine.model.weights import FusedWeights

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(family: str) -> nn.Module:
    torch.manual_seed(9)
    name, _, tied = family.partition("-")
    options = {**SIZES, "tie_word_embeddings": bool(tied)}
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**options))
    if name == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**options))
    if name == "gemma3":
        return Gemma3ForCausalLM(Gemma3TextConfig(**options, head_dim=16, sliding_window=16))
    return Phi3ForCausalLM(Phi3Config(**options))


@pytest.fixture(scope="session")
def save_base(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny base, made once a run."""
    folders: dict[str, Path] = {}

    def save(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp("bases") / family
            model = build(family)
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    nn.init.normal_(parameter, std=0.3)
            model.save_pretrained(folders[family])
        return folders[family]

    return save


@pytest.fixture
def base_folder(save_base: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    """A tiny base; parametrise indirectly with its family, untied Llama otherwise."""
    return save_base(getattr(request, "param", "llama"))


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., tuple[Path, str]]:
    """`train(base_folder, **lora_config)`: the folder that PEFT saved, and its digest."""
    count = iter(range(1_000))

    def make(base: Path, scale: float = 0.1, **config: Any) -> tuple[Path, str]:
        folder = tmp_path / f"adapter-{next(count)}"
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **config))
            generator = torch.Generator().manual_seed(17)
            for name, parameter in peft.named_parameters():
                if "magnitude" in name:
                    parameter.data *= 1 + scale * torch.randn(parameter.shape, generator=generator)
                elif "lora_" in name:
                    parameter.data = scale * torch.randn(parameter.shape, generator=generator)
            peft.save_pretrained(str(folder))
        decoder = read_config(base)
        layout = base_layout(decoder, name=base.name, digest="sha256:00")
        rows = FusedWeights(base, decoder, torch.float32)
        return folder, validate(folder, layout, rows, ValidationLimits()).digest

    return make
