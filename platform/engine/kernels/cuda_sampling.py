"""Sampling on the device: `sampler.sample` for many rows in one launch (`sampling.cu`).

A step's logits stay on the device; only token ids come back. What a row asks for is data in memory,
edits by their address, so a captured graph samples other rows at every replay.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from polyloom.kvcache.kernels.cuda import cuda_kernels
from polyloom.kvcache.kernels.device_arrays import to_device

SOURCE = Path(__file__).with_name("sampling.cu")
KERNELS = ("sample_rows",)
SEEN, MASKED = 1, 2
_THREADS = 256
_LARGEST = float(np.finfo(np.float32).max)
_SAMPLED, _GREEDY, _UNREAD = range(3)
_ROW = np.dtype(
    [
        ("key", np.uint64),
        ("edits", np.uint64),
        ("top_p", np.float64),
        ("presence", np.float64),
        ("frequency", np.float64),
        ("inverse_temperature", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("top_k", np.int32),
        ("num_edits", np.int32),
        ("mode", np.int32),
    ]
)
_EDIT = np.dtype(
    [("token", np.int32), ("count", np.int32), ("flags", np.int32), ("bias", np.float32)]
)
ROW_BYTES = _ROW.itemsize


class RowEdit(NamedTuple):
    """A token whose logit a row changes. times: it is in the output so far.  flags: SEEN, MASKED."""

    token: int
    times: int
    flags: int
    bias: float


@dataclass(frozen=True, slots=True)
class SampledRow:
    """What one row of logits asks for, in the terms of `SamplingParams`; greedy if it says nothing.

    key: of the noise at its position (`noise.draw_key`).  edits: of different tokens.  read: False
    leaves its logits as they are and chooses -1.
    """

    key: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    edits: tuple[RowEdit, ...] = ()
    read: bool = True


UNREAD = SampledRow(read=False)


def kernel_names(dtype: torch.dtype) -> tuple[str, ...]:
    """Logits are fp32 whatever the dtype of the activations."""
    return KERNELS


def describe_rows(
    rows: Sequence[SampledRow], device: torch.device
) -> tuple[NDArray[np.uint8], torch.Tensor]:
    """Rows as the kernel reads them, `ROW_BYTES` each, still on the host; and memory on `device` that
    they have addresses of, to be kept until the kernel is launched."""
    edits = np.array([edit for row in rows for edit in row.edits], dtype=_EDIT)
    (there,) = to_device((edits.view(np.uint8),), device)
    described, address = np.zeros(len(rows), dtype=_ROW), there.data_ptr()
    for index, row in enumerate(rows):
        described[index] = _described(row, address)
        address += len(row.edits) * _EDIT.itemsize
    return described.view(np.uint8), there


def sample_rows(logits: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
    """The next token of each row, `[N]` int32 on the logits' device; -1 where none can be chosen.

    logits: [N, V] fp32, contiguous; changed by the rows' edits.
    """
    described, edits = describe_rows(rows, logits.device)
    (there,) = to_device((described,), logits.device)
    chosen = sample_described(logits, there)
    del edits  # not before the launch
    return chosen


def sample_described(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`sample_rows` of rows that are on the device: uint8, as `describe_rows` makes them."""
    if logits.dtype is not torch.float32 or not logits.is_contiguous():
        raise ValueError("logits must be contiguous float32")
    if logits.shape[0] * ROW_BYTES != rows.numel():
        raise ValueError(f"{rows.numel() // ROW_BYTES} rows for logits {list(logits.shape)}")
    chosen = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    torch.ops.polyloom_cuda.sample_rows(logits, chosen, rows)
    return chosen


def _described(row: SampledRow, edits: int) -> tuple[Any, ...]:
    """One element of `_ROW`."""
    greedy = row.temperature == 0.0
    mode = _UNREAD if not row.read else _GREEDY if greedy else _SAMPLED
    inverse = 1.0 if greedy else min(1.0 / row.temperature, _LARGEST)
    return (
        *(row.key, edits, row.top_p, row.presence, row.frequency, inverse),
        *(row.min_p, row.repetition, row.top_k, len(row.edits), mode),
    )


@torch.library.custom_op("polyloom_cuda::sample_rows", mutates_args=("logits", "chosen"))
def _sample_rows(logits: torch.Tensor, chosen: torch.Tensor, rows: torch.Tensor) -> None:
    kernels = cuda_kernels(SOURCE, KERNELS, logits.device.type)
    kernels.launch(
        KERNELS[0],
        (len(chosen),),
        _THREADS,
        (chosen, logits, rows, np.int32(logits.shape[1])),
        logits.device,
    )


_sample_rows.register_fake(lambda *_: None)
