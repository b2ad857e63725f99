"""What this machine can read from memory, measured in the run that needs the figure."""

import time

import torch


def read_bandwidth(megabytes: int = 1024, rounds: int = 5) -> float:
    """Best observed bytes per second of summing a buffer far larger than the caches."""
    buffer = torch.ones(megabytes * 1024 * 1024 // 4, dtype=torch.float32)
    best = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        buffer.sum()
        best = max(best, buffer.nbytes / (time.perf_counter() - start))
    return best
