"""The CUDA sampler, run from its own text, chooses what the host sampler chooses."""

import numpy as np
import pytest
import torch

from polyloom.platform.engine.kernels.cuda_sampling import SampledRow, sample_rows
from polyloom.platform.engine.sampler import sample
from polyloom.routing.sampling_params import SamplingParams
from tests.cuda_emulator.backend import EmulatedDevice

VOCABULARY = 700


def host(logits: np.ndarray, rows: list[SampledRow]) -> list[int]:
    return [
        sample(row, at.params, at.tokens, at.prompt_len).token_id
        for row, at in zip(logits, rows, strict=True)
    ]


def check(logits: np.ndarray, rows: list[SampledRow]) -> None:
    expected = host(logits, rows)
    chosen = sample_rows(torch.from_numpy(logits.copy()), rows)
    assert chosen.tolist() == expected


def random_row(rng: np.random.Generator) -> SampledRow:
    tokens = [int(t) for t in rng.integers(0, VOCABULARY, int(rng.integers(1, 40)))]
    bias = {int(t): float(b) for t, b in zip(rng.integers(0, VOCABULARY, 3), rng.normal(size=3))}
    params = SamplingParams(
        max_tokens=100,
        seed=int(rng.integers(0, 2**63)),
        choice=int(rng.integers(0, 3)),
        temperature=float(rng.choice([0.0, 0.3, 1.0, 1.7, 1e-30])),
        top_k=int(rng.choice([0, 1, 5, 50, 10_000])),
        top_p=float(rng.choice([1.0, 0.0, 0.3, 0.9, 0.999])),
        min_p=float(rng.choice([0.0, 0.05, 1.0])),
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
        presence_penalty=float(rng.choice([0.0, 0.7, -0.5])),
        frequency_penalty=float(rng.choice([0.0, 0.4])),
        logit_bias=bias if rng.integers(2) else {},
        min_tokens=int(rng.integers(0, 20)),
        stop_token_ids=(3, 8) if rng.integers(2) else (),
    )
    return SampledRow(params, tokens, int(rng.integers(1, len(tokens) + 1)))


@pytest.mark.parametrize("seed", range(6))
def test_chooses_what_the_host_chooses(emulated_device: EmulatedDevice, seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(24, VOCABULARY)) * rng.choice([0.1, 2, 8], (24, 1))).astype(
        np.float32
    )
    check(logits, [random_row(rng) for _ in logits])


def test_ties_are_the_lower_tokens(emulated_device: EmulatedDevice) -> None:
    """Few distinct logits: a top-p that ends among equals keeps the lower ids, a top-k all."""
    rng = np.random.default_rng(1)
    logits = rng.integers(0, 3, (16, VOCABULARY)).astype(np.float32)
    params = [
        SamplingParams(max_tokens=1, seed=n, top_p=p, top_k=k)
        for n, (p, k) in enumerate([(0.01, 0), (0.37, 0), (0.5, 3), (0.9, 0)] * 4)
    ]
    check(logits, [SampledRow(param, [1], 1) for param in params])


def test_uniform_logits_follow_the_noise(emulated_device: EmulatedDevice) -> None:
    logits = np.zeros((8, VOCABULARY), dtype=np.float32)
    rows = [SampledRow(SamplingParams(max_tokens=1, seed=n), [0], 1) for n in range(8)]
    check(logits, rows)
    assert len(set(sample_rows(torch.from_numpy(logits), rows).tolist())) > 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_rows_say_so_alone(emulated_device: EmulatedDevice, bad: float) -> None:
    logits = np.random.default_rng(0).normal(size=(3, VOCABULARY)).astype(np.float32)
    logits[1, 650] = bad
    rows = [SampledRow(SamplingParams(max_tokens=1, seed=1), [0], 1)] * 3
    chosen = sample_rows(torch.from_numpy(logits.copy()), rows).tolist()
    assert chosen[1] == -1
    assert [chosen[0], chosen[2]] == host(logits[[0, 2]], [rows[0], rows[2]])


def test_nothing_left_says_so(emulated_device: EmulatedDevice) -> None:
    logits = torch.full((1, VOCABULARY), float("-inf"))
    row = SampledRow(SamplingParams(max_tokens=1, seed=1), [0], 1)
    assert sample_rows(logits, [row]).tolist() == [-1]


def test_wrong_logits_are_refused(emulated_device: EmulatedDevice) -> None:
    row = SampledRow(SamplingParams(max_tokens=1, seed=1), [0], 1)
    with pytest.raises(ValueError, match="float32"):
        sample_rows(torch.zeros(1, 8, dtype=torch.bfloat16), [row])
    with pytest.raises(ValueError, match="1 rows"):
        sample_rows(torch.zeros(2, 8), [row])
