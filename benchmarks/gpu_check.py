"""Everything about the CUDA path that only a GPU can show, in one run of at most eight minutes.

    python -m benchmarks.gpu_check [--json FILE]      on a machine with a GPU
    python -m benchmarks.gpu_check --dry-run          the same on the CPU, tiny, through the emulator

Compiles every kernel, checks each against float64 on the device, times each against its floor
(bytes over the bandwidth measured in the run) and against plain torch, then times decode steps of an
8B-shaped Llama of random weights. Needs torch, cupy, transformers, peft and numpy, and no network.
"""

import argparse
import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

if __package__ and (ROOT := Path(__file__).resolve().parents[1]):
    sys.path.insert(1, str(ROOT / "typings"))  # polyloom, where it is not installed

import torch
import torch.nn.functional as F

from benchmarks.gpu_decode import time_adapters, time_cold_adapter, time_graphs, time_points
from benchmarks.gpu_model import LLAMA_8B, LONG, TINY, ServedModel
from benchmarks.gpu_report import Clock, Report
from polyloom.adapters.base_layout import ModuleGroup
from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.kvcache.kernels.cuda import stand_in
from polyloom.platform.engine.graphs import CudaRecorder, Recorder
from tests.cuda_emulator.attention_cases import AttentionCase, AttentionShape
from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.lora_cases import LoraCase, LoraShape, Segments, relative
from tests.cuda_emulator.recorder import Rerun

ACCURACY = {torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 1e-2}


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
    """Shrink and expand of one layer's q, k and v for distinct adapters of rank 16, against its floor
    and against other ways of doing it."""
    batch, group = model.sizes.max_batch, ModuleGroup.QKV
    held = [model.adapter(16) for _ in range(batch)]
    lora, shape = model.segments(held), model.pages.pools[group].shape
    x = torch.randn(batch, shape.in_features, device=model.device).to(torch.bfloat16)
    y = torch.zeros(batch, shape.out_features, device=model.device, dtype=torch.bfloat16)
    a = torch.randn(batch, 16, shape.in_features, device=model.device).to(x.dtype)
    b = torch.randn(batch, shape.out_features, 16, device=model.device).to(x.dtype)

    def loop() -> None:
        for i in range(batch):
            b[i] @ (a[i] @ x[i])

    ways: dict[str, Callable[[], object]] = {
        "by the kernels": partial(model.lora_layers.apply, group, 0, x, y, lora),
        "by padded bmm": lambda: torch.bmm(b, torch.bmm(a, x[:, :, None])),
        "by a loop over adapters": loop,
    }
    layer_bytes = batch * 2 * model.pages.pools[group].page_bytes / shape.layers
    report.add("LoRA of q, k, v in a layer, floor", layer_bytes / report.bandwidth * 1e6, "µs")
    for way, work in ways.items():
        name = f"LoRA of q, k, v in a layer, {batch} × rank 16, {way}"
        report.add(name, clock.device_seconds(work) * 1e6, "µs")
    for adapter in held:
        model.pages.free(adapter)


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
    taken = clock.device_seconds(lambda: case.run(plan=plan))
    floor = 2 * sequences * context * shape.kv_heads * shape.dim * 2 / report.bandwidth
    share = floor / taken
    report.add(f"attention, {sequences} × {context} tokens", taken * 1e6, "µs")
    report.bar("… share of the bandwidth", share, "", "≥ 0.7", clock.verdict(share >= 0.7))
    there = case.tables.to(device).long()

    def gathered() -> torch.Tensor:
        k, v = (part[there].transpose(1, 2).flatten(2, 3) for part in (case.keys, case.values))
        return F.scaled_dot_product_attention(case.q[:, :, None], k, v, enable_gqa=True)

    report.add("… by gather and SDPA", clock.device_seconds(gathered) * 1e6, "µs")


def run(report: Report, device: torch.device, recorder: Callable[[], Recorder]) -> None:
    clock = Clock(device)
    usual, long = (LLAMA_8B, LONG) if clock.real else (TINY, replace(TINY, batches=(4,)))
    measure_device(report, clock, device)
    check_kernels(report, device)
    time_attention(report, clock, device)
    model = ServedModel(long, torch.bfloat16, device, recorder())
    time_lora(report, clock, model)
    time_adapters(report, clock, model)
    del model
    gc.collect()  # graphs and what they run through know each other
    torch.cuda.empty_cache()
    model = ServedModel(usual, torch.bfloat16, device, recorder())
    time_graphs(report, clock, model)
    time_cold_adapter(report, clock, model)
    time_points(report, clock, model)
    report.add("captures", model.graphs.capture_seconds, "s")
    for ledger in model.capabilities.ledgers():
        print(
            f"{ledger.name}: {ledger.implementation} ({ledger.why}), compiled in "
            f"{ledger.seconds:.1f} s, ran {ledger.engaged}, fell back {dict(ledger.fallbacks)}"
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
        run(report, device, Rerun if options.dry_run else CudaRecorder)
    for name in report.skipped:
        print(f"{name}: not measured, out of time")
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(report), indent=2))
    print(f"{len(report.failures)} bars fall short" if report.failures else "no bar falls short")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
