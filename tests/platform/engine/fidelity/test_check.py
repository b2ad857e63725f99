"""Verdicts on real adapters: honest ones pass, and what is wrong on either side is seen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyloom.platform.engine.fidelity.check import FidelityCheck
from polyloom.platform.engine.fidelity.messages import Check, FidelitySettings

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


def settings(folder: Path, memory_bytes: int = 1 << 30) -> FidelitySettings:
    return FidelitySettings(
        model_folder=str(folder),
        base_name=folder.name,
        base_digest="sha256:00",
        threads=2,
        memory_bytes=memory_bytes,
        implementation="reference",
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
