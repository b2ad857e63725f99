"""Measures every quality bar of speculation and structured output: one line a bar, a count, and an
exit status.

    make verify-speculation

Each bar is measured against its reference in this same run. docs/verification.md says how to read
the lines.
"""

import contextlib
import sys
from collections.abc import Iterator

import torch

from benchmarks import draft_heads, draft_model, json_drafts, speculation
from benchmarks.bars import Bar, show_bars
from benchmarks.drafting import Base
from benchmarks.seeds import SeedReport, run_real_seeds, run_seeds
from benchmarks.structured import run_spread
from polyloom.platform.engine.model.store import pull

ROUNDS, HEAD_PROMPTS, HEAD_DRAFTS = 3, 6, 3
SCHEMAS, TINY_SEEDS, REAL_SEEDS = 10_000, 300, 24


def seed_bar(name: str, report: SeedReport) -> Bar:
    figure = f"{report.equal} of {report.cases} equal, {report.near_ties} near ties"
    return Bar(
        f"one seed, one text with drafts, {name}", figure, "all, near ties counted", report.ok
    )


def head_bars(threads: int) -> Iterator[Bar]:
    """An adapter's own head on its own prompts."""
    base = pull(draft_heads.SHARED, speculation.DATA_DIR)
    bench = draft_heads.Bench(base, threads, HEAD_DRAFTS, HEAD_PROMPTS)
    with contextlib.closing(bench):
        yield from draft_heads.measured(bench, [draft_heads.DOMAIN], HEAD_PROMPTS)
    yield from draft_heads.adaptive_bars(base, Base(base.folder, threads), ROUNDS)


def all_bars(threads: int) -> Iterator[Bar]:
    base = speculation.real_base(threads)
    draft_model.copy_of(base)  # made before anything is measured
    yield from speculation.bars(base, ROUNDS)
    yield from json_drafts.bars(base, ROUNDS)
    yield from head_bars(threads)
    yield from draft_model.bars(base, ROUNDS)
    yield seed_bar("tiny", run_seeds(TINY_SEEDS))
    yield seed_bar("SmolLM2", run_real_seeds(base, REAL_SEEDS))
    yield from run_spread(SCHEMAS).bars()


def main() -> int:
    threads = min(2, torch.get_num_threads())
    torch.set_num_threads(threads)
    return show_bars(all_bars(threads))


if __name__ == "__main__":
    sys.exit(main())
