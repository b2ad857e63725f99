"""Everything about the CUDA path that only a GPU can show, in one run of at most eight minutes.

    python -m benchmarks.gpu_check [--json FILE]      on a machine with a GPU
    python -m benchmarks.gpu_check --dry-run          the same on the CPU, tiny, through the emulator

Compiles every kernel, checks each against float64 on the device, times each against its floor
(bytes over the bandwidth measured in the run) and against plain torch, then times decode steps of an
8B-shaped Llama of random weights. Needs torch, cupy, transformers, peft and numpy, and no network.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

if __package__ and (ROOT := Path(__file__).resolve().parents[1]):
    sys.path.insert(1, str(ROOT / "typings"))  # polyloom, where it is not installed

import torch
import torch.nn.functional as F

from benchmarks.gpu_model import LLAMA_8B, TINY, ServedModel, Sizes
from polyloom.adapters.base_layout import ModuleGroup
from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.adapters.placement import Allocation
from polyloom.kvcache.kernels.cuda import stand_in
from polyloom.platform.engine.graphs import CudaRecorder, Recorder
from tests.cuda_emulator.attention_cases import AttentionCase, AttentionShape
from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.lora_cases import LoraCase, LoraShape, Segments, relative
from tests.cuda_emulator.recorder import Rerun

LIMIT_SECONDS = 450
ACCURACY = {torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 1e-2}


@dataclass
class Report:
    """What a run found; written as JSON. rows: (what, figure, unit, against)."""

    device: str
    bandwidth: float = 0.0
    rate: float = 0.0
    rows: list[tuple[str, float, str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, what: str, figure: float, unit: str, against: str = "") -> None:
        self.rows.append((what, figure, unit, against))
        print(f"{what:<58} {figure:12.4g} {unit:<8} {against}", flush=True)

    def bar(self, what: str, figure: float, unit: str, bar: str, ok: bool | None) -> None:
        """A figure with a bar; ok is None where this device says nothing about it."""
        verdict = {True: "ok", False: "FALLS SHORT", None: "not measured"}[ok]
        self.add(what, figure, unit, f"({bar}) {verdict}")
        if ok is False:
            self.failures.append(what)


class Clock:
    """Times work on a device; on a CPU it is only there so that the script can be tried."""

    def __init__(self, device: torch.device) -> None:
        self.real = device.type == "cuda"
        self._repeats = 20 if self.real else 1
        self._start = time.monotonic()

    @property
    def over(self) -> bool:
        return time.monotonic() - self._start > LIMIT_SECONDS

    def seconds(self, work: Callable[[], object]) -> float:
        """Mean of some repeats after one that does not count."""
        work()
        self.wait()
        start = time.perf_counter()
        for _ in range(self._repeats):
            work()
        self.wait()
        return (time.perf_counter() - start) / self._repeats

    def host_seconds(self, work: Callable[[], object]) -> float:
        """Until the host is free again, device work not awaited."""
        work()
        self.wait()
        taken = []
        for _ in range(self._repeats):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
            self.wait()
        return sorted(taken)[len(taken) // 2]

    def wait(self) -> None:
        if self.real:
            torch.cuda.synchronize()


def measure_device(report: Report, clock: Clock, device: torch.device) -> None:
    """Bandwidth of reading and writing, and the rate of bf16 products."""
    size = (1 << 30) if clock.real else (1 << 20)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    report.bandwidth = 2 * size / clock.seconds(lambda: target.copy_(source))
    report.add("bandwidth", report.bandwidth / 1e9, "GB/s")
    width = 8192 if clock.real else 64
    a = torch.zeros(width, width, dtype=torch.bfloat16, device=device)
    report.rate = 2 * width**3 / clock.seconds(lambda: a @ a)
    report.add("bf16 products", report.rate / 1e12, "TFLOP/s")


def check_kernels(report: Report, device: torch.device) -> None:
    """Against float64: mixed ranks, the base between, all dtypes; decode, verification, 8 bits."""
    segments: Segments = [(0, 1), (None, 3), (1, 5), (2, 1), (3, 17), (0, 2), (1, 70)]
    for dtype, bar in ACCURACY.items():
        start = time.perf_counter()
        shape = LoraShape(600, (130, 40, 40), layers=2)
        case = LoraCase(
            CudaLoraOp(dtype), shape, [8, 20, 1, 64], dtype, with_rows=True, device=device
        )
        error = case.error(segments)
        report.bar(f"LoRA, {dtype}", error, "", f"≤ {bar:.0e}", error <= bar)
        for eight_bits in (False, True):
            attention = AttentionCase(
                AttentionShape(2, 4, 128, rotary=128), [1, 300, 77, 40], [1, 1, 4, 20], dtype,
                eight_bits=eight_bits,
            )  # fmt: skip
            expected = attention.expected()
            attention.move(device)
            error = relative(attention.run().cpu(), expected)
            wanted = max(bar, 1e-4) if eight_bits else bar
            name = f"attention, {dtype}{', 8 bits' if eight_bits else ''}"
            report.bar(name, error, "", f"≤ {wanted:.0e}", error <= wanted)
        report.add(f"compiled and checked, {dtype}", time.perf_counter() - start, "s")


def time_lora(report: Report, clock: Clock, model: ServedModel) -> None:
    """Shrink and expand of one layer for distinct adapters of rank 16, against other ways."""
    batch = min(64, model.sizes.max_batch)
    sets = {
        "q/v and o": [ModuleGroup.QKV, ModuleGroup.OUT],
        "all linear": [g for g in model.pages.pools if g != ModuleGroup.HEAD],
    }
    for name, groups in sets.items():
        adapters = [model.adapter(16, groups) for _ in range(batch)]
        lora = model.segments(adapters)
        total, floor = 0.0, 0.0
        for group in groups:
            pool = model.pages.pools[group]
            shape = pool.shape
            x = torch.randn(batch, shape.in_features, device=model.device).to(torch.bfloat16)
            y = torch.zeros(batch, shape.out_features, device=model.device, dtype=torch.bfloat16)
            total += clock.seconds(partial(model.lora_layers.apply, group, 0, x, y, lora))
            floor += batch * 2 * pool.page_bytes / shape.layers / report.bandwidth
            if group is ModuleGroup.QKV:
                _time_plain(report, clock, x, shape.out_features, f"LoRA {name}, {group}")
        ratio = total / floor
        verdict = ratio <= 1.25 if clock.real else None
        report.add(f"LoRA of {batch} × rank 16, {name}, a layer", total * 1e6, "µs")
        report.bar(f"… against its pages' bytes, {name}", ratio, "×", "≤ 1.25 ×", verdict)
        for adapter in adapters:
            model.pages.free(adapter)


def _time_plain(report: Report, clock: Clock, x: torch.Tensor, outs: int, name: str) -> None:
    """The same by padded batched products, and by a loop over adapters."""
    batch, inputs = x.shape
    a = torch.randn(batch, 16, inputs, device=x.device).to(x.dtype)
    b = torch.randn(batch, outs, 16, device=x.device).to(x.dtype)
    report.add(
        f"{name}, padded bmm", clock.seconds(lambda: torch.bmm(b, torch.bmm(a, x[:, :, None]))) * 1e6, "µs"
    )  # fmt: skip

    def loop() -> None:
        for i in range(batch):
            b[i] @ (a[i] @ x[i])

    report.add(f"{name}, loop over adapters", clock.seconds(loop) * 1e6, "µs")


def time_attention(report: Report, clock: Clock, device: torch.device) -> None:
    """One decode of a layer against reading its context once, and against gather and SDPA."""
    sequences, context = (64, 8192) if clock.real else (2, 64)
    shape = AttentionShape(8, 4, 128) if clock.real else AttentionShape(2, 2, 32)
    case = AttentionCase(shape, [32] * sequences, [1] * sequences, torch.bfloat16)
    case.move(device)
    blocks = -(-context // shape.block_size)
    case.contexts = [context] * sequences
    case.tables = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    cache = (sequences * blocks, shape.kv_heads, shape.block_size, shape.dim)
    case.keys, case.values = (
        torch.zeros(cache, dtype=torch.bfloat16, device=device) for _ in range(2)
    )
    plan = case.plan()
    taken = clock.seconds(lambda: case.run(plan=plan))
    floor = 2 * sequences * context * shape.kv_heads * shape.dim * 2 / report.bandwidth
    share = floor / taken
    report.add(f"attention, {sequences} × {context} tokens", taken * 1e6, "µs")
    verdict = share >= 0.7 if clock.real else None
    report.bar("… share of the bandwidth", share, "", "≥ 0.7", verdict)

    def gathered() -> torch.Tensor:
        tables = case.tables.to(device).long()
        k, v = (part[tables].transpose(1, 2).flatten(2, 3) for part in (case.keys, case.values))
        return F.scaled_dot_product_attention(case.q[:, :, None], k, v, enable_gqa=True)

    report.add("… by gather and SDPA", clock.seconds(gathered) * 1e6, "µs")


def points(sizes: Sizes) -> Iterator[tuple[int, int, str, int | None]]:
    """(batch, adapters, mix, rank; None for mixed ranks): at most 30, each with and without graphs."""
    for batch in [size for size in (1, 16, 64, 256) if size <= sizes.max_batch]:
        yield batch, 0, "base", 8
        for adapters in [n for n in (1, 16, 64, 256) if n <= batch]:
            mix = "identical" if adapters == 1 else "distinct" if adapters == batch else "zipf"
            for rank in (8, 64) if adapters in (1, 64) else (None,):
                if rank is None or rank <= sizes.max_rank:
                    yield batch, adapters, mix, rank


def time_decode(report: Report, clock: Clock, model: ServedModel) -> None:
    """Tokens a second of decode steps, eager and by graphs."""
    for batch, adapters, mix, rank in points(model.sizes):
        name = f"decode, batch {batch}, {adapters} adapters, {mix}, rank {rank or 'mixed'}"
        if clock.over:
            report.skipped.append(name)
            continue
        top = min(64, model.sizes.max_rank)
        ranks = [rank or (8, 16, top)[i % 3] for i in range(adapters)]
        held = [model.adapter(one) for one in ranks]
        step, lora = model.step(batch), model.segments(_mixed(held, batch, mix))
        for graphs in (False, True):
            taken = clock.seconds(partial(model.forward, step, lora, graphs=graphs))
            report.add(f"{name}{', graph' if graphs else ''}", batch / taken, "tok/s")
        for adapter in held:
            model.pages.free(adapter)


def _mixed(held: list[Allocation], batch: int, mix: str) -> list[Allocation | None]:
    """Whose token each of the batch is; those of one adapter are neighbours."""
    if not held:
        return [None] * batch
    if mix == "zipf":
        shares = [1 / (1 + i) for i in range(len(held))]
        counts = [max(1, int(batch * share / sum(shares))) for share in shares]
    else:
        counts = [batch // len(held)] * len(held)
    chosen = [one for one, count in zip(held, counts, strict=True) for _ in range(count)]
    return [*chosen, *[held[0]] * batch][:batch]


def time_graphs(report: Report, clock: Clock, model: ServedModel) -> None:
    """The host's share of a step."""
    batch = min(16, model.sizes.max_batch)
    adapter = model.adapter(16)
    step, lora = model.step(batch), model.segments([adapter] * batch)
    eager, replayed = (
        clock.host_seconds(partial(model.forward, step, lora, graphs=graphs))
        for graphs in (False, True)
    )
    report.add("host time of a step, eager", eager * 1e3, "ms")
    report.add("host time of a step, graph", replayed * 1e3, "ms")
    verdict = eager / replayed >= 3 if clock.real else None
    report.bar("… eager over graph", eager / replayed, "×", "≥ 3 ×", verdict)
    report.add("captured so far", model.graphs.capture_seconds, "s")
    model.pages.free(adapter)


def time_cold_adapter(report: Report, clock: Clock, model: ServedModel) -> None:
    """A revision of rank 16 from host memory to its first token."""

    def cold() -> None:
        adapter = model.adapter(16)
        for group, ids in adapter.pages.items():
            for page_id in ids:
                page = model.pages.pools[group].page(page_id)
                page.copy_(torch.zeros(page.shape, dtype=page.dtype))
        model.forward(model.step(1), model.segments([adapter]), graphs=False)
        clock.wait()
        model.pages.free(adapter)

    report.add("cold adapter to its first token", clock.seconds(cold) * 1e3, "ms")


def run(report: Report, device: torch.device, sizes: Sizes, recorder: Recorder) -> None:
    clock = Clock(device)
    measure_device(report, clock, device)
    check_kernels(report, device)
    time_attention(report, clock, device)
    model = ServedModel(sizes, torch.bfloat16, device, recorder)
    time_lora(report, clock, model)
    time_graphs(report, clock, model)
    time_cold_adapter(report, clock, model)
    time_decode(report, clock, model)
    for ledger in model.capabilities.ledgers():
        print(
            f"{ledger.name}: {ledger.implementation}, ran {ledger.engaged}, {dict(ledger.fallbacks)}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="tiny, on the CPU, emulated")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        print("no GPU here: nothing was measured; --dry-run tries the script on the CPU")
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    report = Report("emulated" if options.dry_run else torch.cuda.get_device_name())
    context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if options.dry_run:
        context = stand_in("cpu", EmulatedDevice())
    with context, torch.inference_mode():
        recorder: Recorder = Rerun() if options.dry_run else CudaRecorder()
        run(report, device, TINY if options.dry_run else LLAMA_8B, recorder)
    for name in report.skipped:
        print(f"{name}: not measured, out of time")
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=2))
    print(f"{len(report.failures)} bars fall short" if report.failures else "no bar falls short")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
