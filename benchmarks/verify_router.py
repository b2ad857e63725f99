"""Measures every quality bar of routes, prefix caches and fairness: one line a bar, a count, and an
exit status.

    make verify-router

Each bar is measured against its reference in this same run. docs/verification.md says how to read
the lines.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import torch

from benchmarks import cache_timing, warm_prefix
from benchmarks.bars import Bar, show_bars
from benchmarks.chunking import chunking_bars, run_chunking, show
from benchmarks.fairness import fairness_bars, run_fairness
from benchmarks.outages import outages
from benchmarks.route_changes import route_changes
from benchmarks.two_servers import promotion_bars, promotions
from polyloom.platform.engine.model.store import pull

DATA_DIR = Path.home() / ".cache/polyloom/test-base"


def engine_bars(base: Path) -> Iterator[Bar]:
    yield from fairness_bars(run_fairness(base))
    rows = run_chunking(base)
    show(rows)
    yield from chunking_bars(rows)


def all_bars() -> Iterator[Bar]:
    base = pull("smollm2-135m-instruct", DATA_DIR).folder
    yield from engine_bars(base)
    yield from asyncio.run(warm_prefix.served())
    yield from asyncio.run(cache_timing.served())
    yield from asyncio.run(route_changes())
    yield from promotion_bars(asyncio.run(promotions()))
    yield from asyncio.run(_gathered(outages(str(base))))


async def _gathered(bars: AsyncIterator[Bar]) -> list[Bar]:
    return [bar async for bar in bars]


def main() -> int:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    return show_bars(all_bars())


if __name__ == "__main__":
    sys.exit(main())
