"""The CUDA sampler, run from its own text, chooses what the host sampler chooses."""

import numpy as np
import pytest
import torch

from polyloom.platform.engine.device_sampling import sampled_row
from polyloom.platform.engine.kernels.cuda_sampling import UNREAD, SampledRow, sample_rows
from polyloom.routing.sampling_params import SamplingParams
from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.sampling_cases import VOCABULARY, Asked, check, device, host, random_row


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
    check(logits, [Asked(param, [1], 1) for param in params])


def test_uniform_logits_follow_the_noise(emulated_device: EmulatedDevice) -> None:
    logits = np.zeros((8, VOCABULARY), dtype=np.float32)
    rows = [Asked(SamplingParams(max_tokens=1, seed=n), [0], 1) for n in range(8)]
    check(logits, rows)
    assert len(set(device(torch.from_numpy(logits), rows))) > 4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_rows_say_so_alone(emulated_device: EmulatedDevice, bad: float) -> None:
    logits = np.random.default_rng(0).normal(size=(3, VOCABULARY)).astype(np.float32)
    logits[1, 650] = bad
    rows = [Asked(SamplingParams(max_tokens=1, seed=1), [0], 1)] * 3
    chosen = device(torch.from_numpy(logits.copy()), rows)
    assert chosen[1] == -1
    assert [chosen[0], chosen[2]] == host(logits[[0, 2]], [rows[0], rows[2]])


def test_nothing_left_says_so(emulated_device: EmulatedDevice) -> None:
    logits = torch.full((1, VOCABULARY), float("-inf"))
    row = Asked(SamplingParams(max_tokens=1, seed=1), [0], 1)
    assert device(logits, [row]) == [-1]


def test_unread_rows_are_left_alone(emulated_device: EmulatedDevice) -> None:
    """Their logits are for the host, beside a row that changes its own."""
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(3, VOCABULARY))).float()
    asked = Asked(SamplingParams(max_tokens=1, seed=1, logit_bias={5: 50.0}), [0], 1)
    row = sampled_row(*asked)
    before = logits.clone()
    assert sample_rows(logits, [UNREAD, row, UNREAD]).tolist() == [-1, 5, -1]
    assert torch.equal(logits[[0, 2]], before[[0, 2]]) and logits[1, 5] == before[1, 5] + 50


def test_wrong_logits_are_refused(emulated_device: EmulatedDevice) -> None:
    row = SampledRow()
    with pytest.raises(ValueError, match="float32"):
        sample_rows(torch.zeros(1, 8, dtype=torch.bfloat16), [row])
    with pytest.raises(ValueError, match="1 rows"):
        sample_rows(torch.zeros(2, 8), [row])
