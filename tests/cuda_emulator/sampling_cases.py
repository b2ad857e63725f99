"""Rows of logits with all parameters of sampling, and what the host sampler makes of them."""

import numpy as np
import torch

from polyloom.platform.engine.kernels.cuda_sampling import SampledRow, sample_rows
from polyloom.platform.engine.sampler import sample
from polyloom.routing.sampling_params import SamplingParams

VOCABULARY = 700


def host(logits: np.ndarray, rows: list[SampledRow]) -> list[int]:
    return [
        sample(row, at.params, at.tokens, at.prompt_len).token_id
        for row, at in zip(logits, rows, strict=True)
    ]


def check(logits: np.ndarray, rows: list[SampledRow]) -> None:
    """AssertionError unless the device chooses what the host does."""
    expected = host(logits, rows)
    chosen = sample_rows(torch.from_numpy(logits.copy()), rows)
    assert chosen.tolist() == expected


def random_row(rng: np.random.Generator) -> SampledRow:
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
    return SampledRow(params, tokens, int(rng.integers(1, len(tokens) + 1)))
