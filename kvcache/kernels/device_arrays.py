"""Many small host arrays to a device in one copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNMENT = 16


def to_device(
    arrays: Sequence[NDArray[Any]], device: torch.device, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The same arrays as tensors on `device`, each aligned to 16 bytes, all in one copy.

    into: uint8 memory on the device to place them in, which the same shapes fill the same way at
    every call; a graph that was captured over it then reads the new values.
    """
    offsets, size = [], 0
    for array in arrays:
        offsets.append(size)
        size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    view = host.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        view[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    if into is None:
        memory = host.to(device, non_blocking=True)
    else:
        memory = into[:size].copy_(host, non_blocking=True)
    return tuple(
        memory[offset : offset + array.nbytes]
        .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        .view(array.shape)
        for array, offset in zip(arrays, offsets, strict=True)
    )


def filled(array: NDArray[Any], shape: Sequence[int], value: int) -> NDArray[Any]:
    """`array` in the low corner of a larger one of `shape`, the rest `value`."""
    larger = np.full(shape, value, dtype=array.dtype)
    larger[tuple(slice(size) for size in array.shape)] = array
    return larger
