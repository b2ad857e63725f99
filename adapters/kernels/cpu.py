"""The LoRA gather op for CPUs: C++ over pages packed as 32-bit words; see `lora_layout.h`."""

from functools import cache
from pathlib import Path

import torch
from torch.nn.functional import pad

from polyloom.adapters.base_layout import GroupShape
from polyloom.adapters.config import PAGE_RANKS
from polyloom.adapters.group_pool import GroupPool
from polyloom.adapters.segments import LoraBatch
from polyloom.kvcache.kernels.build import load_cpu_ops

_SOURCES = (Path(__file__).parent / "lora.cpp",)
_DTYPES = (torch.bfloat16, torch.float32)
_LANES = 16


def load_cpu_lora(dtype: torch.dtype) -> str | None:
    """Build and load the op; the reason if `dtype` cannot run on it."""
    if dtype not in _DTYPES:
        return f"no CPU op for {dtype}"
    return load_cpu_ops("polyloom_lora", _SOURCES)


class CpuLoraOp:
    """Needs `load_cpu_lora` to have returned None. Segments of 8 tokens and more run on AMX tiles
    where the machine has them and the dtype is bfloat16."""

    name = "cpu"

    def __init__(self, dtype: torch.dtype) -> None:
        self._per_word = torch.float32.itemsize // dtype.itemsize
        self._call = torch.ops.polyloom_lora.apply.default

    def layer_elements(self, shape: GroupShape) -> int:
        padded_in = _up(shape.in_features, _LANES * self._per_word)
        padded_out = sum(_up(part.out_features, _LANES) for part in shape.slices)
        return PAGE_RANKS * (len(shape.slices) * padded_in + padded_out)

    def pack(self, shape: GroupShape, a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> None:
        per_word = self._per_word
        padded_in = _up(shape.in_features, _LANES * per_word)
        words = pad(a, (0, padded_in - shape.in_features))
        words = words.view(len(shape.slices), PAGE_RANKS, -1, per_word).permute(0, 2, 1, 3)
        into[: words.numel()].view(words.shape).copy_(words)
        start = words.numel()
        for part in shape.slices:
            padded_out = _up(part.out_features, _LANES)
            columns = b[:, part.offset : part.offset + part.out_features]
            words = pad(columns, (0, padded_out - part.out_features))
            words = words.view(PAGE_RANKS // per_word, per_word, -1, _LANES).permute(2, 0, 3, 1)
            into[start : start + words.numel()].view(words.shape).copy_(words)
            start += words.numel()

    def apply(
        self,
        pool: GroupPool,
        layer: int,
        x: torch.Tensor,
        y: torch.Tensor,
        batch: LoraBatch,
        bias: torch.Tensor | None,
    ) -> int:
        tiled: int = self._call(
            x,
            y,
            batch.starts,
            batch.slots,
            batch.pages.get(pool.shape.group),
            pool.addresses,
            pool.masks,
            pool.row_addresses,
            bias,
            _offsets(pool.shape),
            layer,
        )
        return tiled


@cache
def _offsets(shape: GroupShape) -> torch.Tensor:
    """[slices + 1] int32: first output row of each slice, and the end."""
    edges = [part.offset for part in shape.slices] + [shape.out_features]
    return torch.tensor(edges, dtype=torch.int32)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
