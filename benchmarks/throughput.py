"""Mixed adapters through the engine against PEFT's own mixed batch, and against the bare base.

    python -m benchmarks.throughput

SmolLM2 in bfloat16 on this CPU: 16 concurrent requests of 128 tokens in and 128 out over 16 adapters
on all seven linear modules (twelve of rank 16, two of 8, two of 64). Loads with and without
adapters alternate; PEFT's `generate(adapter_names=[…])` runs in the same run.
"""

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from benchmarks.adapters import THROUGHPUT_RANKS, AdapterShape, make_adapters
from benchmarks.bandwidth import read_bandwidth
from benchmarks.load import LoadResult, request, run_load
from benchmarks.parity import BASE_DIGEST, sources
from benchmarks.peft_baseline import PeftBaseline
from polyloom.adapters.source import AdapterSource
from polyloom.platform.engine.client import EngineClient
from polyloom.platform.engine.model.store import pull
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.supervisor import EngineSupervisor

STREAMS = 16
PROMPT_TOKENS = OUTPUT_TOKENS = 128
ROUNDS = 3
VOCABULARY = 49_000


@dataclass(frozen=True)
class ThroughputReport:
    """Medians over the rounds.

    adapter_bytes: what 16 tokens of 16 adapters must read in bfloat16.  bandwidth: bytes/s.
    """

    base: LoadResult
    mixed: LoadResult
    single_base: LoadResult
    single_adapter: LoadResult
    peft_tokens_per_second: float
    adapter_bytes: int
    bandwidth: float

    @property
    def times_peft(self) -> float:
        return self.mixed.tokens_per_second / self.peft_tokens_per_second

    @property
    def added_seconds(self) -> float:
        """What 16 adapters add to a decode step of 16 sequences."""
        return self.mixed.itl - self.base.itl

    @property
    def floor_seconds(self) -> float:
        return self.adapter_bytes / self.bandwidth

    @property
    def times_floor(self) -> float:
        return self.added_seconds / self.floor_seconds


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def bf16_bytes(folders: Sequence[Path]) -> int:
    """Bytes of the adapters' A and B as the engine holds them."""
    total = 0
    for folder in folders:
        with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (a safe_open is no mapping)
                total += 2 * file.get_tensor(name).numel()
    return total


@contextlib.asynccontextmanager
async def running_engine(base: Path) -> AsyncIterator[EngineClient]:
    """An engine process of its own with the defaults of a CPU."""
    with tempfile.TemporaryDirectory(prefix="polyloom-bench-") as folder:
        settings = EngineSettings(
            model_folder=str(base),
            base_name=str(base),
            base_digest=BASE_DIGEST,
            address=f"ipc://{folder}/engine.sock",
            drafters=(),  # batching alone is measured
            kv_memory=1 << 30,
            adapter_memory=512 << 20,
            threads=torch.get_num_threads(),
        )
        supervisor = EngineSupervisor(settings)
        client = await supervisor.start()
        try:
            yield client
        finally:
            await supervisor.close()


async def one_load(
    client: EngineClient, adapters: Sequence[AdapterSource | None], streams: int, seed: int
) -> LoadResult:
    """`streams` requests at once, stream i on adapter i modulo their number."""
    works = [
        request(BASE_DIGEST, adapters[i % len(adapters)], prompt, OUTPUT_TOKENS)
        for i, prompt in enumerate(prompts(streams, seed))
    ]
    return await run_load(client, works)


async def engine_loads(base: Path, adapters: Sequence[AdapterSource]) -> dict[str, LoadResult]:
    """The four loads, warmed up, alternating; of each the round of median speed."""
    loads: dict[str, tuple[Sequence[AdapterSource | None], int]] = {
        "base": ([None], STREAMS),
        "mixed": (adapters, STREAMS),
        "single_base": ([None], 1),
        "single_adapter": (adapters[:1], 1),
    }
    rounds: dict[str, list[LoadResult]] = {name: [] for name in loads}
    async with running_engine(base) as client:
        for who, streams in loads.values():
            await one_load(client, who, streams, seed=0)
        for number in range(1, ROUNDS + 1):
            for name, (who, streams) in loads.items():
                rounds[name].append(await one_load(client, who, streams, seed=number))
    return {name: _median_round(results) for name, results in rounds.items()}


def _median_round(results: Sequence[LoadResult]) -> LoadResult:
    middle = statistics.median_low(result.itl for result in results)
    return next(result for result in results if result.itl == middle)


def run_throughput(base: Path) -> ThroughputReport:
    """Everything, in one run."""
    with tempfile.TemporaryDirectory(prefix="polyloom-bench-") as folder:
        shapes = [AdapterShape(rank) for rank in THROUGHPUT_RANKS]
        folders = make_adapters(base, Path(folder), shapes)
        loads = asyncio.run(engine_loads(base, sources(base, folders)))
        bandwidth = read_bandwidth()
        peft = PeftBaseline(base, folders, torch.bfloat16)
        peft.generate(prompts(STREAMS, 0), 2)
        result = peft.generate(prompts(STREAMS, 1), OUTPUT_TOKENS)
        return ThroughputReport(
            **loads,
            peft_tokens_per_second=result.tokens_per_second,
            adapter_bytes=bf16_bytes(folders),
            bandwidth=bandwidth,
        )


def show(report: ThroughputReport) -> None:
    table = Table("load", "tokens/s", "TTFT p50, ms", "ITL p50, ms")
    for name, result in (
        ("16 × 16 adapters", report.mixed),
        ("16 × base", report.base),
        ("1 × one adapter (rank 16)", report.single_adapter),
        ("1 × base", report.single_base),
    ):
        speed = f"{result.tokens_per_second:.1f}"
        table.add_row(name, speed, f"{result.ttft * 1e3:.0f}", f"{result.itl * 1e3:.1f}")
    table.add_row("PEFT, 16 × 16 adapters in one batch", f"{report.peft_tokens_per_second:.1f}")
    Console().print(table)
    print(
        f"{report.times_peft:.1f} × PEFT's mixed batch; 16 adapters add "
        f"{report.added_seconds * 1e3:.1f} ms to a step, {report.times_floor:.2f} × the "
        f"{report.floor_seconds * 1e3:.1f} ms that reading their {report.adapter_bytes / 1e6:.0f} "
        f"MB takes at {report.bandwidth / 1e9:.1f} GB/s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path.home() / ".cache/polyloom/test-base")
    options = parser.parse_args()
    show(run_throughput(pull("smollm2-135m-instruct", options.data_dir).folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
