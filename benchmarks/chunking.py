"""Chunks sized by the load against chunks of one size, on three mixed loads.

    python -m benchmarks.chunking

SmolLM2 in bfloat16 on this CPU. The figure is **on-time tokens a second**: answer tokens that came
within the ITL target of the one before, and first tokens that came within FIRST_TARGET of their
request, over the seconds until the whole load was answered. Chunks that are too large make tokens
late, chunks that are too small make the load take longer; what a user notices of either is in it.
The fixed sizes are step budgets (decodes included); loads and sizes are interleaved.
"""

import argparse
import contextlib
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.bars import Bar, show_bars
from benchmarks.in_process import Arrival, Recording, drive
from benchmarks.load import request
from benchmarks.parity import BASE_DIGEST
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.model.store import pull
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.step import Engine

FIXED = (64, 128, 256, 512)
ITL_TARGET, FIRST_TARGET, NO_TARGET = 0.1, 2.0, 1e6  # seconds
ROUNDS = 3
WITHIN = 0.95
VOCABULARY = 49_000


@dataclass(frozen=True)
class Kind:
    """`count` requests of a size, evenly over `seconds`."""

    count: int
    seconds: float
    prompt: int
    output: int


LOADS = {
    "chats and two long prompts": (Kind(24, 4.0, 80, 40), Kind(2, 3.0, 1500, 20)),
    "documents, short answers": (Kind(6, 4.0, 700, 24), Kind(6, 4.0, 60, 40)),
    "long answers, a few prompts": (Kind(10, 0.5, 40, 110), Kind(3, 4.0, 600, 20)),
}


def arrivals(kinds: Sequence[Kind], seed: int) -> list[Arrival]:
    """Random prompts: nothing is in the prefix cache."""
    rng = random.Random(seed)
    return [
        Arrival(
            (index + rng.random()) * kind.seconds / kind.count,
            request(
                BASE_DIGEST,
                None,
                [rng.randrange(100, VOCABULARY) for _ in range(kind.prompt)],
                kind.output,
            ),
        )
        for kind in kinds
        for index in range(kind.count)
    ]


def on_time(recording: Recording) -> float:
    """On-time tokens a second."""
    count = 0
    for stream in recording.streams.values():
        count += stream.first <= FIRST_TARGET
        count += sum(gap <= ITL_TARGET for gap in stream.gaps)
    return count / recording.seconds


@dataclass(frozen=True)
class Row:
    """Of one load and size. on_time: tokens a second of each round; else medians, in seconds."""

    on_time: tuple[float, ...]
    seconds: float
    itl_p95: float
    first_p95: float


def measured(recordings: Sequence[Recording]) -> Row:
    def median(of: Callable[[Recording], float]) -> float:
        return statistics.median(map(of, recordings))

    return Row(
        tuple(map(on_time, recordings)),
        median(lambda r: r.seconds),
        median(lambda r: _p95([gap for s in r.streams.values() for gap in s.gaps])),
        median(lambda r: _p95([s.first for s in r.streams.values()])),
    )


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


@contextlib.contextmanager
def engines(base: Path) -> Iterator[dict[str, Engine]]:
    """One engine a size, and the one that chooses; warmed up by the same load, so it has measured
    its steps."""
    made: dict[str, Engine] = {}
    with contextlib.ExitStack() as stack:
        for budget, target in (*((size, NO_TARGET) for size in FIXED), (512, ITL_TARGET)):
            settings = EngineSettings(
                model_folder=str(base),
                base_name=str(base),
                base_digest=BASE_DIGEST,
                address="ipc:///unused",
                drafters=(),  # batching alone is measured
                kv_memory=256 << 20,
                adapter_memory=16 << 20,
                threads=torch.get_num_threads(),
                token_budget=budget,
                itl_target=target,
            )
            engine = stack.enter_context(contextlib.closing(build_engine(settings)))
            made["adaptive" if target == ITL_TARGET else str(budget)] = engine
        yield made


def run_chunking(base: Path, loads: Sequence[str] = tuple(LOADS)) -> dict[str, dict[str, Row]]:
    """Rows by load and size."""
    rows: dict[str, dict[str, Row]] = {}
    with engines(base) as made:
        for engine in made.values():
            drive(engine, arrivals((Kind(6, 0.5, 200, 16),), seed=0))
        for load in loads:
            found: dict[str, list[Recording]] = {name: [] for name in made}
            for number in range(ROUNDS):
                order = list(made)[:: 1 if number % 2 else -1]  # so that no one is always first
                for name in order:
                    found[name].append(drive(made[name], arrivals(LOADS[load], seed=number + 1)))
            rows[load] = {name: measured(recordings) for name, recordings in found.items()}
        status = made["adaptive"].status()
    print(
        f"adaptive: {status.chunks_total} chunks of {status.prompt_tokens_total} prompt tokens, "
        f"{status.chunk_changes_total} changes of size, at most "
        f"{status.chunk_overhead_seconds_total:.2f} s of fixed step costs for cutting"
    )
    return rows


def show(rows: dict[str, dict[str, Row]]) -> None:
    """The table."""
    table = Table("load", "chunk", "on-time tokens/s", "seconds", "ITL p95, ms", "TTFT p95, s")
    for load, sizes in rows.items():
        for size, row in sizes.items():
            speed = f"{statistics.median(row.on_time):.1f}"
            seconds = f"{row.seconds:.1f}"
            table.add_row(
                load, size, speed, seconds, f"{row.itl_p95 * 1e3:.0f}", f"{row.first_p95:.2f}"
            )
    Console().print(table)


def chunking_bars(rows: dict[str, dict[str, Row]]) -> Iterator[Bar]:
    """A bar a load: against the fixed size that does best beside it, round by round."""
    for load, sizes in rows.items():
        ratios = {size: _beside(sizes["adaptive"], sizes[str(size)]) for size in FIXED}
        best = min(FIXED, key=lambda size: ratios[size])
        ratio = ratios[best]
        figure = f"{ratio:.3f} × the best fixed size, {best}"
        yield Bar(f"adaptive chunks, {load}", figure, f"≥ {WITHIN}", ratio >= WITHIN)


def _beside(row: Row, other: Row) -> float:
    """Median over the rounds of one's speed over the other's: both saw the same machine."""
    pairs = zip(row.on_time, other.on_time, strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path.home() / ".cache/polyloom/test-base")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    rows = run_chunking(pull("smollm2-135m-instruct", options.data_dir).folder)
    show(rows)
    return show_bars(chunking_bars(rows))


if __name__ == "__main__":
    sys.exit(main())
