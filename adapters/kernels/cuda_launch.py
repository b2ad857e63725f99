"""Launches of `lora.cu` as a torch op, and the names of its instantiations."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from polyloom.adapters.config import PAGE_RANKS
from polyloom.kvcache.kernels.cuda import SCALAR_TYPES, cuda_kernels

SOURCE = Path(__file__).with_name("lora.cu")
TILE = 16
_EXPAND_THREADS = 256
_WANTED_BLOCKS = 1024


def kernel_names(dtype: torch.dtype) -> tuple[str, ...]:
    """Instantiations for pools of `dtype`."""
    scalar = SCALAR_TYPES[dtype]
    return (f"lora_shrink<{scalar}>", f"lora_expand<{scalar}>")


def padded(in_features: int) -> int:
    """Input features as a page holds them."""
    return up(in_features, 8)


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@torch.library.custom_op("polyloom_cuda::lora", mutates_args=("y", "partial"))
def _lora(
    x: torch.Tensor,
    y: torch.Tensor,
    partial: torch.Tensor,
    tiles: torch.Tensor,
    order: torch.Tensor,
    pages: torch.Tensor,
    masks: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    offsets: Sequence[int],
    layer: int,
) -> None:
    """Shrink and expand the tiles of a plan, in one layer of a group. offsets: of its slices."""
    kernels = cuda_kernels(SOURCE, kernel_names(x.dtype), x.device.type)
    scalar, slices = SCALAR_TYPES[x.dtype], len(offsets)
    inputs, outs, width = x.shape[1], y.shape[1], pages.shape[1]
    width_of_a = padded(inputs)
    size_a = slices * PAGE_RANKS * width_of_a
    layer_bytes = up(size_a + outs * PAGE_RANKS, 64) * x.element_size() * layer
    splits, tokens, ranks = partial.shape
    table_bytes = up(width * 12, 16)
    kernels.launch(
        f"lora_shrink<{scalar}>",
        (len(tiles), splits),
        128,
        (
            partial,
            x,
            tiles,
            order,
            pages,
            masks,
            *map(np.int32, (tokens, width, slices, inputs, width_of_a)),
            *map(np.int64, (x.stride(0), layer_bytes)),
        ),
        x.device,
        table_bytes,
    )
    edges = [*offsets[1:], outs, outs][:2]
    chunk = _outs_a_block(len(tiles), outs)
    kernels.launch(
        f"lora_expand<{scalar}>",
        (len(tiles), -(-outs // chunk)),
        _EXPAND_THREADS,
        (
            y,
            partial,
            tiles,
            order,
            pages,
            masks,
            rows,
            bias,
            *map(np.int32, (tokens, width, slices, *edges, outs, chunk, splits)),
            *map(
                np.int64,
                (y.stride(0), layer_bytes + size_a * x.element_size(), layer * 2 * outs * 4),
            ),
        ),
        x.device,
        table_bytes + TILE * ranks * 4,
    )


@_lora.register_fake
def _lora_fake(*_: object) -> None:
    """Changes y and partial, returns nothing."""


def _outs_a_block(tiles: int, outs: int) -> int:
    """Outputs that one block makes: many, since each block reads the shrunk values anew; fewer
    where there would be too few blocks to fill a device."""
    blocks = -(-_WANTED_BLOCKS // tiles)
    return min(4 * _EXPAND_THREADS, max(_EXPAND_THREADS, up(outs // blocks, _EXPAND_THREADS)))
