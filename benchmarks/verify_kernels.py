"""Measures every quality bar of the CUDA kernels that is a figure, without a GPU.

    make verify-kernels

The kernels' own text runs on the CPU, thread by thread; docs/verification.md says how to read the
lines. What needs a device is `not measured` here: `python -m benchmarks.gpu_check` measures it.
"""

import sys
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.bars import Bar, show_bars
from benchmarks.kernel_traffic import measure, show
from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.kvcache.kernels.cuda import read_source, stand_in
from tests.cuda_emulator.attention_cases import AttentionCase, AttentionShape
from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.lora_cases import LoraCase, LoraShape, relative
from tests.cuda_emulator.mutations import MUTATIONS, caught
from tests.cuda_emulator.nvrtc import ARCHITECTURES, compile_for
from tests.cuda_emulator.sampling_cases import VOCABULARY, check, random_row
from tests.cuda_emulator.sources import SOURCES

ACCURACY = {torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 1e-2}
ROUNDS = 12


def compiled() -> Iterator[Bar]:
    """Every kernel for every architecture, with a table of what it uses."""
    print(f"{'kernel':<52} {'arch':<7} {'registers':>9} {'shared':>7} {'spilled':>7}")
    for architecture in ARCHITECTURES:
        kernels = [
            kernel
            for source, names in SOURCES
            for kernel in compile_for(
                read_source(source),
                tuple(dict.fromkeys(name for dtype in ACCURACY for name in names(dtype))),
                architecture,
            )
        ]
        for kernel in kernels:
            print(
                f"{kernel.name:<52} {architecture:<7} {kernel.registers:>9} "
                f"{kernel.shared_bytes:>7} {kernel.spilled_bytes:>7}"
            )
        spilled = sum(kernel.spilled_bytes for kernel in kernels)
        most = max(kernel.registers for kernel in kernels)
        figure = f"{len(kernels)} kernels, at most {most} registers, {spilled} bytes spilled"
        yield Bar(f"compiled for {architecture}", figure, "no spills", spilled == 0)


def lora_error(dtype: torch.dtype) -> float:
    """The worst of random shapes, ranks and mixes."""
    worst = 0.0
    for seed in range(ROUNDS):
        rng = np.random.default_rng(seed)
        outputs = tuple(int(n) for n in rng.integers(1, 300, int(rng.integers(1, 4))))
        ranks = [int(rank) for rank in rng.integers(1, 65, 4)]
        shape = LoraShape(int(rng.integers(1, 1200)), outputs)
        case = LoraCase(CudaLoraOp(dtype), shape, ranks, dtype, with_rows=bool(seed % 2), seed=seed)
        choices = [None, *range(len(ranks))]
        segments = [(choices[rng.integers(5)], int(rng.integers(1, 40))) for _ in range(8)]
        worst = max(worst, case.error(segments))
    return worst


def attention_error(dtype: torch.dtype) -> float:
    """The worst of random heads, contexts, windows and caps."""
    worst = 0.0
    for seed in range(ROUNDS):
        rng = np.random.default_rng(seed)
        dim = int(rng.choice([32, 64, 128]))
        shape = AttentionShape(int(rng.integers(1, 4)), int(rng.integers(1, 9)), dim, rotary=dim)
        counts = [int(n) for n in rng.choice([1, 1, 4, 8], 4)]
        contexts = [count + int(rng.integers(0, 200)) for count in counts]
        case = AttentionCase(shape, contexts, counts, dtype, seed=seed)
        options = {
            "window": 50 if seed % 3 == 1 else None,
            "softcap": 9.0 if seed % 3 == 2 else None,
        }
        expected = case.expected(**options)
        worst = max(worst, relative(case.run(**options), expected))
    return worst


def accuracy() -> Iterator[Bar]:
    for dtype, bar in ACCURACY.items():
        for name, worst_of in (("LoRA", lora_error), ("attention", attention_error)):
            error = worst_of(dtype)
            yield Bar(f"{name}, {dtype}", f"{error:.1e} of float64", f"≤ {bar:.0e}", error <= bar)


def sampling() -> Bar:
    rng = np.random.default_rng(0)
    rows = 96
    logits = (rng.normal(size=(rows, VOCABULARY)) * 3).astype(np.float32)
    try:
        check(logits, [random_row(rng) for _ in range(rows)])
    except AssertionError:
        return Bar("sampling on the device", "differs", "the host's tokens", False)
    return Bar("sampling on the device", f"{rows} of {rows} equal", "the host's tokens", True)


def traffic(device: EmulatedDevice) -> Iterator[Bar]:
    """What shrink and expand load and launch; prints the table."""
    rows = list(measure(device))
    show(rows)
    for row in rows:
        figure = f"{row.ratio:.3f} × unavoidable"
        yield Bar(f"bytes loaded, {row.mix}", figure, "≤ 1.1 ×", row.ratio <= 1.1)
    most = max(row.launches for row in rows)
    yield Bar("launches a layer", f"{most}", "≤ 8", most <= 8)


def mutations() -> Bar:
    """Prints how each planted fault shows."""
    missed = 0
    for mutation in MUTATIONS:
        how = caught(mutation)
        missed += how is None
        print(f"  {mutation.name}: {how or 'NOT CAUGHT'}", flush=True)
    figure = f"{len(MUTATIONS) - missed} of {len(MUTATIONS)} caught"
    return Bar("planted faults", figure, "all, at least 10", missed == 0 and len(MUTATIONS) >= 10)


def on_a_device() -> Iterator[Bar]:
    """Bars of time, which only a device can measure."""
    for name, bar in (
        ("64 adapters of rank 16 at batch 64", "≤ 1.25 × their bytes over bandwidth"),
        ("paged attention at 8k context", "≥ 70 % of bandwidth"),
        ("graphs, host time of a step", "≤ 1/3 of eager"),
    ):
        yield Bar(name, "needs a GPU: python -m benchmarks.gpu_check", bar, None)


def all_bars() -> Iterator[Bar]:
    yield from compiled()
    device = EmulatedDevice()
    with stand_in("cpu", device):
        yield from accuracy()
        yield sampling()
        yield from traffic(device)
    yield mutations()
    yield from on_a_device()


def main() -> int:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    return show_bars(all_bars())


if __name__ == "__main__":
    sys.exit(main())
