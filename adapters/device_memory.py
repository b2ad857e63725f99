"""Zeroed device memory that goes back to the system the moment its tensor dies."""

import mmap
import sys

import torch


def zeroed_bytes(num_bytes: int, device: torch.device) -> torch.Tensor:
    """`[num_bytes]` uint8 zeros on `device`, aligned to 64 bytes at least.

    On a CPU each tensor is its own anonymous mapping: the heap would keep freed megabytes, and
    only a mapping can ask for the large pages that streaming through weights profits from.
    """
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    if sys.platform == "win32":
        mapping = mmap.mmap(-1, num_bytes)
    else:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)
