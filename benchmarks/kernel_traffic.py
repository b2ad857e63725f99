"""Bytes and launches of the LoRA kernels for mixes of adapters, counted, not timed.

    python -m benchmarks.kernel_traffic

The kernels run from their own text on the CPU, where each load and store of global memory is counted.
Unavoidable is: each active page once per 16 tokens of its adapter, activations once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from polyloom.adapters.kernels import cuda_launch
from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.kvcache.kernels.cuda import cuda_kernels, stand_in
from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.lora_cases import LoraCase, LoraShape, Segments

SHAPE = LoraShape(1024, (1024, 256, 256))  # a q, k, v of grouped heads
GROUPS_A_LAYER = 4
MIXES: dict[str, tuple[list[int], Segments]] = {
    "64 distinct": ([16] * 64, [(i, 1) for i in range(64)]),
    "63 of one": ([16], [(0, 63)]),
    "zipf": ([16] * 18, [(0, 24), (1, 12), (2, 8), (3, 6), *[(i, 1) for i in range(4, 18)]]),
    "8, neighbours apart": ([16] * 8, [(i % 8, 1) for i in range(64)]),
    "ranks 8 to 64": ([8, 16, 24, 64] * 8, [(i, 1) for i in range(32)]),
    "half of the base": ([16] * 16, [(i // 2 if i % 2 else None, 1) for i in range(32)]),
}


@dataclass(frozen=True)
class MovedBytes:
    """One mix in one group of one layer. Bytes by shrink and expand together; launches by a layer."""

    mix: str
    tokens: int
    pages: int
    unavoidable: int
    loaded: int
    stored: int
    launches: int

    @property
    def ratio(self) -> float:
        return self.loaded / self.unavoidable


def measure(device: EmulatedDevice) -> Iterator[MovedBytes]:
    """bfloat16; `device` must stand in for the CPU."""
    dtype = torch.bfloat16
    kernels = cuda_kernels(cuda_launch.SOURCE, cuda_launch.kernel_names(dtype), "cpu")
    for name, (ranks, segments) in MIXES.items():
        case = LoraCase(CudaLoraOp(dtype), SHAPE, ranks, dtype)
        device.traffic()
        before = kernels.launches
        case.error(segments, bias=False)
        moved = device.traffic()
        yield MovedBytes(
            name,
            sum(count for _, count in segments),
            case.pages_read(segments),
            case.unavoidable_bytes(segments),
            moved.loaded,
            moved.stored,
            (kernels.launches - before) * GROUPS_A_LAYER,
        )


def show(rows: list[MovedBytes]) -> None:
    print(
        f"{'mix':<20} {'tokens':>6} {'pages':>6} {'unavoidable':>12} {'loaded':>10} {'ratio':>7} "
        f"{'stored':>8} {'launches a layer':>17}"
    )
    for row in rows:
        print(
            f"{row.mix:<20} {row.tokens:>6} {row.pages:>6} {row.unavoidable:>12} {row.loaded:>10} "
            f"{row.ratio:>7.4f} {row.stored:>8} {row.launches:>17}"
        )


def main() -> None:
    device = EmulatedDevice()
    with stand_in("cpu", device):
        show(list(measure(device)))


if __name__ == "__main__":
    main()
