"""Logits of the base with an adapter's terms applied by hand equal PEFT's, in fp32."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyloom.adapters.validation import ValidationLimits, load_adapter_weights, validate
from polyloom.adapters.weights import AdapterWeights

TOKENS = torch.tensor([[5, 9, 33, 7, 60, 2, 41], [8, 8, 12, 3, 4, 50, 51]])
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Adapted(nn.Module):
    """A linear with the terms of an AdapterWeights that fall on its rows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.terms: list[tuple[slice, torch.Tensor, torch.Tensor]] = []
        self.gain = torch.ones(linear.out_features)
        self.shift = torch.zeros(linear.out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.gain * F.linear(x, self.linear.weight) + self.shift
        if self.linear.bias is not None:
            y = y + self.linear.bias
        for rows, a, b in self.terms:
            y[..., rows] += F.linear(F.linear(x, a), b)
        return y


def apply_by_hand(base: Any, weights: AdapterWeights) -> nn.Module:
    model = copy.deepcopy(base.model)
    adapted: dict[str, Adapted] = {}

    def at(term: Any, size: int) -> Any:
        for module in base.layout.modules:
            last = module.offset + module.out_features
            if module.group is term.group and module.offset <= term.offset < last:
                assert term.offset + size <= last
                path = module.path
                if term.group != "head":
                    path = f"model.layers.{term.layer}.{path}"
                if path not in adapted:
                    adapted[path] = Adapted(model.get_submodule(path))
                    model.set_submodule(path, adapted[path])
                start = term.offset - module.offset
                return adapted[path], slice(start, start + size)
        raise AssertionError(term)

    for term in weights.terms:
        module, rows = at(term, term.b.shape[0])
        module.terms.append((rows, term.a, term.b))
    for row in weights.rows:
        vector = row.gain if row.gain is not None else row.shift
        module, rows = at(row, vector.shape[0])
        if row.gain is not None:
            module.gain[rows] = row.gain
        if row.shift is not None:
            module.shift[rows] = row.shift
    return model


CASES: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj"]},
    "all modules by name": {"r": 3, "lora_alpha": 6, "target_modules": ALL},
    "all-linear": {"r": 2, "target_modules": "all-linear"},
    "rank-stabilised": {"r": 9, "lora_alpha": 3, "use_rslora": True, "target_modules": ALL},
    "regex": {"r": 4, "target_modules": r".*\.[12]\.(self_attn\.[qk]_proj|mlp\.down_proj)"},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7, r"^model.layers.2.*v_proj": 5},
        "alpha_pattern": {r"self_attn\.k_proj": 1, r"layers.0.*down_proj": 64},
    },
    "patterns, rank-stabilised": {
        "r": 4,
        "use_rslora": True,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 3},
    },
    "one layer": {"r": 4, "target_modules": ALL, "layers_to_transform": 1},
    "layers by pattern": {
        "r": 4,
        "target_modules": ["q_proj"],
        "layers_to_transform": [0, 2],
        "layers_pattern": "layers",
    },
    "excluded by name": {"r": 4, "target_modules": ALL, "exclude_modules": ["up_proj"]},
    "excluded by regex": {
        "r": 4,
        "target_modules": ALL,
        "exclude_modules": r".*\.0\..*|.*down_proj",
    },
    "head": {"r": 4, "lora_alpha": 9, "target_modules": ["q_proj", "lm_head"]},
    "head alone": {"r": 4, "target_modules": ["lm_head"]},
    "DoRA": {"r": 4, "lora_alpha": 9, "use_dora": True, "target_modules": ALL},
    "DoRA on the head": {"r": 4, "use_dora": True, "target_modules": ["lm_head", "o_proj"]},
    "DoRA, rank-stabilised, patterns": {
        "r": 4,
        "use_dora": True,
        "use_rslora": True,
        "target_modules": ALL,
        "rank_pattern": {"down_proj": 8},
    },
    "lora_bias": {"r": 4, "lora_alpha": 9, "lora_bias": True, "target_modules": ALL},
    "fan_in_fan_out, which PEFT switches off": {
        "r": 4,
        "fan_in_fan_out": True,
        "target_modules": ["q_proj"],
    },
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
def test_logits_equal_pefts(
    name: str, family: str, make_base: Callable[..., Any], train: Callable[..., Any]
) -> None:
    base = make_base(family.split("-")[0], tie_word_embeddings=family.endswith("tied"))
    plain = copy.deepcopy(base.model)
    trained = train(base, **CASES[name])
    expected = trained.logits(TOKENS)
    base = type(base)(plain, base.layout)

    verdict = validate(trained.folder, base.layout, base, ValidationLimits())
    weights = load_adapter_weights(trained.folder, base.layout, base, verdict.digest)

    with torch.no_grad():
        ours = apply_by_hand(base, weights)(TOKENS).logits
        untouched = plain(TOKENS).logits
    assert (ours - expected).abs().max() < 2e-4
    assert (untouched - expected).abs().max() > 1e-2
    assert weights.digest == verdict.digest


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]},
        {"target_modules": "all-linear", "use_dora": True},
        {"target_modules": ["gate_up_proj"], "lora_bias": True},
    ],
)
def test_fused_checkpoint_modules(
    config: dict[str, Any], make_base: Callable[..., Any], train: Callable[..., Any]
) -> None:
    base = make_base("phi3")
    plain = copy.deepcopy(base.model)
    trained = train(base, r=4, **config)
    base = type(base)(plain, base.layout)
    weights = load_adapter_weights(trained.folder, base.layout, base, None)
    with torch.no_grad():
        ours = apply_by_hand(base, weights)(TOKENS).logits
    assert (ours - trained.logits(TOKENS)).abs().max() < 2e-4
