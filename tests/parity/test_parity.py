"""The engine against PEFT on whole random mixes; `benchmarks.parity` runs the same, larger."""

import pytest

from benchmarks.parity import ParityReport, run_parity, run_tiny, tiny_base
from benchmarks.seeds import run_seeds
from polyloom.platform.engine.model.store import BaseModel

SMOLLM2_BLOCK_BYTES = 16 * 30 * 2 * 3 * 64 * 4


def assert_exercised(report: ParityReport) -> None:
    assert report.preemptions > 0
    assert report.chunked > 0
    assert report.base_cases > 0


@pytest.mark.slow
def test_random_mixes_equal_peft_on_each_adapter_alone() -> None:
    report = run_tiny(400)
    assert_exercised(report)
    assert report.ok, report


@pytest.mark.slow
def test_one_seed_gives_one_text() -> None:
    report = run_seeds(60)
    assert report.preemptions > 0
    assert report.ok, report


@pytest.mark.slow
def test_mixes_on_the_real_base_equal_peft(smollm2: BaseModel) -> None:
    report = run_parity(smollm2.folder, 40, kv_memory=16 * SMOLLM2_BLOCK_BYTES, token_budget=64)
    assert_exercised(report)
    assert report.ok, report


def test_the_comparison_sees_a_wrong_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: answers of one adapter held to another's PEFT are far off."""
    from benchmarks import parity

    rotated = parity.sources

    def shifted(*arguments):  # type: ignore[no-untyped-def]
        found = rotated(*arguments)
        return found[1:] + found[:1]

    monkeypatch.setattr(parity, "sources", shifted)
    with tiny_base() as base:
        report = run_parity(base, 40, kv_memory=4 << 20, token_budget=48)
    assert not report.ok
    assert report.wrong > 0
