"""Measures every quality bar of the CUDA kernels that is a figure, without a GPU.

    make verify-kernels

The kernels' own text runs on the CPU, thread by thread; docs/verification.md says how to read the
lines. What needs a device is `not measured` here: `python -m benchmarks.gpu_check` measures it.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from polyloom.adapters.kernels import cuda as lora_cuda
from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.kvcache.kernels.cuda import cuda_kernels, read_source, stand_in
from tests.cuda_emulator.attention_cases import AttentionCase, AttentionShape
from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.lora_cases import LoraCase, LoraShape, Segments, relative
from tests.cuda_emulator.mutations import MUTATIONS, caught
from tests.cuda_emulator.nvrtc import ARCHITECTURES, compile_for
from tests.cuda_emulator.sampling_cases import VOCABULARY, check, random_row
from tests.cuda_emulator.sources import SOURCES

ACCURACY = {torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 1e-2}
ROUNDS = 12
GROUPS_A_LAYER = 4
MIXES: dict[str, Segments] = {
    "64 distinct": [(i, 1) for i in range(64)],
    "64 of one": [(0, 64 - 1)],
    "zipf": [(0, 24), (1, 12), (2, 8), (3, 6), *[(i, 1) for i in range(4, 18)]],
    "apart": [(i % 8, 1) for i in range(64)],
}


@dataclass(frozen=True)
class Bar:
    """One measured bar; ok is None where this machine cannot measure it."""

    name: str
    figure: str
    bar: str
    ok: bool | None

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FALLS SHORT", None: "not measured"}[self.ok]
        return f"{self.name}: {self.figure} ({self.bar}) {verdict}"


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
        for name, measure in (("LoRA", lora_error), ("attention", attention_error)):
            error = measure(dtype)
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
    """Bytes that shrink and expand load, and their launches, on a q, k, v of 1,024 features."""
    dtype = torch.bfloat16
    case = LoraCase(CudaLoraOp(dtype), LoraShape(1024, (1024, 256, 256)), [16] * 64, dtype)
    kernels = cuda_kernels(lora_cuda.SOURCE, lora_cuda.kernel_names(dtype), "cpu")
    for name, segments in MIXES.items():
        device.traffic()
        before = kernels.launches
        case.error(segments, bias=False)
        ratio = device.traffic().loaded / case.unavoidable_bytes(segments)
        yield Bar(f"bytes loaded, {name}", f"{ratio:.3f} × unavoidable", "≤ 1.1 ×", ratio <= 1.1)
        launches = (kernels.launches - before) * GROUPS_A_LAYER
        yield Bar(f"launches a layer, {name}", f"{launches}", "≤ 8", launches <= 8)


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
    bars = []
    for bar in all_bars():
        print(bar, flush=True)
        bars.append(bar)
    short = sum(bar.ok is False for bar in bars)
    unknown = sum(bar.ok is None for bar in bars)
    print(f"{len(bars) - short - unknown} of {len(bars)} bars met, {unknown} not measured")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
