"""Sampling on the device: `sampler.sample` for many rows in one launch (`sampling.cu`).

A step's logits stay on the device; only token ids come back. Rows whose parameters ask for logprobs
are the host sampler's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyloom.kvcache.kernels.cuda import cuda_kernels
from polyloom.kvcache.kernels.device_arrays import to_device
from polyloom.platform.engine.noise import draw_key
from polyloom.routing.sampling_params import SamplingParams

SOURCE = Path(__file__).with_name("sampling.cu")
_THREADS = 256
_LARGEST = float(np.finfo(np.float32).max)
_SEEN, _MASKED = 1, 2
_ROW = np.dtype(
    [
        ("key", np.uint64),
        ("top_p", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("inverse_temperature", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("top_k", np.int32),
        ("first_edit", np.int32),
        ("last_edit", np.int32),
        ("greedy", np.int32),
        ("padding", np.int32),
    ]
)
_EDIT = np.dtype(
    [("token", np.int32), ("count", np.int32), ("flags", np.int32), ("bias", np.float32)]
)


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One row of logits: it follows `tokens`, of which the first `prompt_len` are the prompt."""

    params: SamplingParams
    tokens: Sequence[int]
    prompt_len: int


def kernel_names(dtype: torch.dtype) -> tuple[str, ...]:
    """Logits are fp32 whatever the dtype of the activations."""
    return ("sample_rows",)


def sample_rows(logits: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
    """The next token of each row, `[N]` int32 on the logits' device; -1 where none can be chosen.

    logits: [N, V] fp32, contiguous; changed by the rows' penalties.
    """
    if logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise ValueError("logits must be contiguous float32")
    if logits.shape[0] != len(rows):
        raise ValueError(f"{len(rows)} rows for logits {list(logits.shape)}")
    described, edits = _describe(rows)
    on_device = to_device((described.view(np.uint8), edits.view(np.uint8)), logits.device)
    chosen = torch.empty(len(rows), dtype=torch.int32, device=logits.device)
    torch.ops.polyloom_cuda.sample_rows(logits, chosen, *on_device)
    return chosen


def _describe(rows: Sequence[SampledRow]) -> tuple[NDArray[Any], NDArray[Any]]:
    described = np.zeros(len(rows), dtype=_ROW)
    edits: list[tuple[int, int, int, float]] = []
    for index, row in enumerate(rows):
        params, first = row.params, len(edits)
        edits += _edits(row)
        greedy = params.temperature == 0.0
        described[index] = (
            draw_key(params.seed, params.choice, len(row.tokens) - row.prompt_len),
            params.top_p,
            params.presence_penalty,
            params.frequency_penalty,
            1.0 if greedy else min(1.0 / params.temperature, _LARGEST),
            params.min_p,
            params.repetition_penalty,
            params.top_k,
            first,
            len(edits),
            greedy,
            0,
        )
    return described, np.array(edits, dtype=_EDIT)


def _edits(row: SampledRow) -> list[tuple[int, int, int, float]]:
    """(token, count in the output, flags, bias) of each token that the row's parameters change."""
    params, output = row.params, row.tokens[row.prompt_len :]
    seen: set[int] = set(row.tokens) if params.repetition_penalty != 1.0 else set()
    counts: dict[int, int] = {}
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        for token in output:
            counts[token] = counts.get(token, 0) + 1
    masked = set(params.stop_token_ids) if len(output) < params.min_tokens else set()
    tokens = sorted(seen | counts.keys() | params.logit_bias.keys() | masked)
    return [
        (
            token,
            counts.get(token, 0),
            _SEEN * (token in seen) | _MASKED * (token in masked),
            params.logit_bias.get(token, 0.0),
        )
        for token in tokens
    ]


@torch.library.custom_op("polyloom_cuda::sample_rows", mutates_args=("logits", "chosen"))
def _sample_rows(
    logits: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor, edits: torch.Tensor
) -> None:
    kernels = cuda_kernels(SOURCE, ("sample_rows",), logits.device.type)
    kernels.launch(
        "sample_rows",
        (len(chosen),),
        _THREADS,
        (chosen, logits, rows, edits, np.int32(logits.shape[1])),
        logits.device,
    )


_sample_rows.register_fake(lambda *_: None)
