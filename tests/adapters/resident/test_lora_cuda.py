"""The CUDA LoRA kernels, run from their own text: accuracy, bytes, launches, refusals."""

import numpy as np
import pytest
import torch

from polyloom.adapters.kernels import cuda_launch
from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.adapters.kernels.cuda_plan import MATMUL_TOKENS
from polyloom.kvcache.kernels.cuda import cuda_kernels
from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.lora_cases import LoraCase, LoraShape, Segments

BARS = {torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 1e-2}


def random_segments(rng: np.random.Generator, revisions: int) -> Segments:
    """Up to twelve segments of one to forty tokens; revisions come back, the base lies between."""
    choices = [None, *range(revisions)]
    count = int(rng.integers(1, 13))
    return [(choices[rng.integers(len(choices))], int(rng.integers(1, 41))) for _ in range(count)]


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes_and_mixes(emulated_device: EmulatedDevice, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = list(BARS)[seed % 3]
    slices = int(rng.integers(1, 4))
    shape = LoraShape(
        int(rng.integers(1, 1400 if seed % 4 == 0 else 200)),
        tuple(int(n) for n in rng.integers(1, 300, slices)),
        layers=int(rng.integers(1, 3)),
    )
    ranks = [int(rank) for rank in rng.integers(1, 41, int(rng.integers(1, 5)))]
    case = LoraCase(CudaLoraOp(dtype), shape, ranks, dtype, with_rows=bool(seed % 2), seed=seed)
    segments = random_segments(rng, len(ranks))
    assert case.error(segments, bias=bool(rng.integers(2))) <= BARS[dtype]


@pytest.mark.parametrize("dtype", BARS)
def test_seventeen_tokens_of_one_revision_are_two_tiles(
    emulated_device: EmulatedDevice, dtype: torch.dtype
) -> None:
    case = LoraCase(CudaLoraOp(dtype), LoraShape(72, (40, 24)), [20, 8], dtype)
    assert case.error([(0, 3), (1, 1), (0, 13), (None, 2), (0, 1)]) <= BARS[dtype]


MIXES = {
    "distinct": [(i, 1) for i in range(16)],
    "identical": [(0, 16)],
    "zipf": [(0, 8), (1, 4), (2, 2), *[(i, 1) for i in range(3, 11)], (None, 3)],
    "apart": [(i % 4, 1) for i in range(32)],
}


@pytest.mark.parametrize("mix", MIXES)
def test_pages_are_read_once_in_two_launches(emulated_device: EmulatedDevice, mix: str) -> None:
    dtype = torch.bfloat16
    kernels = cuda_kernels(cuda_launch.SOURCE, cuda_launch.kernel_names(dtype), "cpu")
    case = LoraCase(CudaLoraOp(dtype), LoraShape(1024, (1024, 256, 256)), [16] * 16, dtype)
    emulated_device.traffic()
    before = kernels.launches
    assert case.error(MIXES[mix], bias=False) <= BARS[dtype]
    assert kernels.launches - before == 2
    loaded = emulated_device.traffic().loaded
    assert 1.0 <= loaded / case.unavoidable_bytes(MIXES[mix]) <= 1.1


def test_only_long_segments_are_left_to_torch(emulated_device: EmulatedDevice) -> None:
    dtype = torch.float32
    op = CudaLoraOp(dtype)
    case = LoraCase(op, LoraShape(96, (64, 32)), [12, 5], dtype, with_rows=True)
    segments = [(0, MATMUL_TOKENS), (None, 3), (1, MATMUL_TOKENS - 1), (0, 1)]
    assert case.error(segments) <= 2e-6
    x, y, bias = case.activations(sum(count for _, count in segments))
    assert op.apply(case.pool, 0, x, y, case.batch(segments), bias) == 1


@pytest.mark.parametrize(
    ("x_shape", "y_shape", "named"),
    [
        ((4, 72), (4, 100), "y must be"),
        ((5, 72), (4, 144), "x must be"),
        ((4,), (4, 144), "x must"),
    ],
)
def test_wrong_shapes_are_named(
    emulated_device: EmulatedDevice,
    x_shape: tuple[int, ...],
    y_shape: tuple[int, ...],
    named: str,
) -> None:
    case = LoraCase(CudaLoraOp(torch.float32), LoraShape(72, (100, 44)), [8], torch.float32)
    with pytest.raises(ValueError, match=named):
        case.op.apply(
            case.pool, 0, torch.zeros(x_shape), torch.zeros(y_shape), case.batch([(0, 4)]), None
        )


def test_another_dtype_is_refused(emulated_device: EmulatedDevice) -> None:
    case = LoraCase(CudaLoraOp(torch.float32), LoraShape(8, (8,)), [8], torch.float32)
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="x must be torch.float32"):
        case.op.apply(case.pool, 0, x, x.clone(), case.batch([(0, 1)]), None)
