"""Verdicts on real adapters: honest ones pass, and what is wrong on either side is seen."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import load_file, save_file

from polyloom.adapters.validation import load_adapter_weights
from polyloom.adapters.weights import AdapterWeights
from polyloom.platform.engine.fidelity.check import FidelityCheck
from polyloom.platform.engine.fidelity.errors import UncheckableError
from polyloom.platform.engine.fidelity.messages import Check, FidelitySettings
from polyloom.platform.engine.fidelity.streamed_peft import hollow_model

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "plain": {"r": 12, "lora_alpha": 7, "target_modules": ALL},
    "patterns": {
        "r": 3,
        "use_rslora": True,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 17},
        "alpha_pattern": {"up_proj": 5},
    },
    "DoRA with the head": {"r": 4, "use_dora": True, "target_modules": [*ALL, "lm_head"]},
    "lora_bias": {"r": 4, "lora_bias": True, "target_modules": ALL},
}


@pytest.fixture(params=["resident", "streamed"])
def checked(request: pytest.FixtureRequest, base_folder: Path) -> FidelityCheck:
    memory = 1 << 30 if request.param == "resident" else 1
    return FidelityCheck(settings(base_folder, memory))


def settings(
    folder: Path,
    memory_bytes: int = 1 << 30,
    implementation: Literal["auto", "reference"] = "reference",
) -> FidelitySettings:
    return FidelitySettings(
        model_folder=str(folder),
        base_name=folder.name,
        base_digest="sha256:00",
        threads=2,
        memory_bytes=memory_bytes,
        implementation=implementation,
    )


@pytest.mark.parametrize(
    "base_folder", ["llama", "llama-tied", "phi3", "qwen2", "gemma3-tied"], indirect=True
)
def test_honest_adapters_pass(
    checked: FidelityCheck, base_folder: Path, train: Callable[..., tuple[Path, str]]
) -> None:
    for config in ADAPTERS.values():
        if "phi3" in base_folder.name and "lm_head" not in config["target_modules"]:
            config = {**config, "target_modules": "all-linear"}
        folder, digest = train(base_folder, **config)
        verdict = checked.run(Check(str(folder), digest))
        assert verdict.max_logprob_diff < 1e-4
        assert verdict.passed
        assert verdict.max_effect > 0.1


@pytest.mark.parametrize("memory_bytes", [1 << 30, 1])
def test_the_ops_that_serve_are_the_ops_that_are_checked(
    memory_bytes: int, base_folder: Path, train: Callable[..., tuple[Path, str]]
) -> None:
    check = FidelityCheck(settings(base_folder, memory_bytes, "auto"))
    for config in ADAPTERS.values():
        folder, digest = train(base_folder, **config)
        assert check.run(Check(str(folder), digest)).max_logprob_diff < 1e-4


def test_streaming_changes_no_number(
    base_folder: Path, train: Callable[..., tuple[Path, str]]
) -> None:
    folder, digest = train(base_folder, **ADAPTERS["DoRA with the head"])
    whole = FidelityCheck(settings(base_folder)).run(Check(str(folder), digest))
    streamed = FidelityCheck(settings(base_folder, memory_bytes=1)).run(Check(str(folder), digest))
    assert streamed.streamed and not whole.streamed
    assert streamed.max_effect == whole.max_effect
    assert streamed.max_logprob_diff == pytest.approx(whole.max_logprob_diff, abs=1e-6)


def test_an_adapter_that_does_nothing_is_recorded_as_such(
    base_folder: Path, train: Callable[..., tuple[Path, str]]
) -> None:
    folder, digest = train(base_folder, scale=0.0, **ADAPTERS["plain"])
    verdict = FidelityCheck(settings(base_folder)).run(Check(str(folder), digest))
    assert verdict.passed
    assert verdict.max_effect == 0.0


@pytest.mark.parametrize("fault", ["scale", "one row", "one layer missing", "not a number"])
def test_a_wrong_engine_is_noticed(
    fault: str,
    base_folder: Path,
    train: Callable[..., tuple[Path, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Controls: what the check must see. 1 % of scale is far more than a rounding."""

    def faulty(*arguments: Any) -> AdapterWeights:
        weights = load_adapter_weights(*arguments)
        terms = list(weights.terms)
        if fault == "one layer missing":
            terms = [t for t in terms if t.layer != 1]
        elif fault == "scale":
            terms = [replace(t, b=t.b * 1.01) for t in terms]
        else:
            terms[3].b[0] = float("nan") if fault == "not a number" else 0.0
        return replace(weights, terms=tuple(terms))

    folder, digest = train(base_folder, **ADAPTERS["plain"])
    monkeypatch.setattr("polyloom.platform.engine.fidelity.check.load_adapter_weights", faulty)
    verdict = FidelityCheck(settings(base_folder)).run(Check(str(folder), digest))
    assert not verdict.passed


def test_an_adapter_of_another_trainers_names(
    base_folder: Path, train: Callable[..., tuple[Path, str]]
) -> None:
    """PEFT would find nothing under these names: it is given the same tensors under the base's."""
    config = {**ADAPTERS["patterns"], "layers_to_transform": [0, 2], "layers_pattern": "layers"}
    folder, digest = train(base_folder, **config)
    file = folder / "adapter_model.safetensors"
    renamed = {
        name.replace("base_model.model.model.", "base_model.model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file)
    verdict = FidelityCheck(settings(base_folder)).run(Check(str(folder), digest))
    assert verdict.passed and verdict.max_effect > 0.1


def test_bytes_that_rotted_have_no_verdict(
    base_folder: Path, train: Callable[..., tuple[Path, str]]
) -> None:
    folder, _ = train(base_folder, **ADAPTERS["plain"])
    check = FidelityCheck(settings(base_folder))
    with pytest.raises(UncheckableError, match="sha256:11: the stored files are"):
        check.run(Check(str(folder), "sha256:11"))


def test_one_adapter_leaves_nothing_for_the_next(
    base_folder: Path, train: Callable[..., tuple[Path, str]]
) -> None:
    check = FidelityCheck(settings(base_folder))
    folder, digest = train(base_folder, **ADAPTERS["plain"])
    first = check.run(Check(str(folder), digest))
    for name in ("DoRA with the head", "lora_bias"):
        other, other_digest = train(base_folder, **ADAPTERS[name])
        check.run(Check(str(other), other_digest))
    again = check.run(Check(str(folder), digest))
    assert (first.max_logprob_diff, first.max_effect) == (again.max_logprob_diff, again.max_effect)


def test_a_hollow_model_holds_no_weights(base_folder: Path) -> None:
    model = hollow_model(base_folder)
    assert sum(p.untyped_storage().nbytes() for p in model.parameters()) < 1_000
