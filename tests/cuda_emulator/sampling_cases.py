"""Rows of logits with all parameters of sampling, and what the host sampler makes of them."""

from typing import NamedTuple

import numpy as np
import torch

from polyloom.platform.engine.device_sampling import sampled_row
from polyloom.platform.engine.kernels.cuda_sampling import sample_rows
from polyloom.platform.engine.sampler import sample
from polyloom.routing.sampling_params import SamplingParams

VOCABULARY = 700


class Asked(NamedTuple):
    """A row that follows `tokens`, of which the first `prompt_len` are the prompt."""

    params: SamplingParams
    tokens: list[int]
    prompt_len: int


def device(logits: torch.Tensor, rows: list[Asked]) -> list[int]:
    return sample_rows(logits, [sampled_row(*row) for row in rows]).tolist()


def host(logits: np.ndarray, rows: list[Asked]) -> list[int]:
    return [
        sample(row, at.params, at.tokens, at.prompt_len).token_id
        for row, at in zip(logits, rows, strict=True)
    ]


def check(logits: np.ndarray, rows: list[Asked]) -> None:
    """AssertionError unless the device chooses what the host does."""
    assert device(torch.from_numpy(logits.copy()), rows) == host(logits, rows)


def random_row(rng: np.random.Generator) -> Asked:
    tokens = [int(t) for t in rng.integers(0, VOCABULARY, int(rng.integers(1, 40)))]
    bias = {
        int(t): float(b)
        for t, b in zip(rng.integers(0, VOCABULARY, 3), rng.normal(size=3), strict=True)
    }
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
    return Asked(params, tokens, int(rng.integers(1, len(tokens) + 1)))
