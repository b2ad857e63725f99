"""Speculation's own bars: what n-gram drafts give where text repeats, and what drafting costs else.

    python -m benchmarks.speculation [--rounds 5]

SmolLM2 in bfloat16 in this process. Every figure is a ratio of two ways of drafting that take turns
(`benchmarks.drafting`); in brackets stands the middle half of the rounds.
"""

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from benchmarks.bars import Bar, show_bars
from benchmarks.drafting import Base, Drafting, Workload, first_tokens, pace, paired, switched
from benchmarks.repeating_texts import CODE_EDITS, COPIES, PROSE
from polyloom.platform.engine.model.store import pull
from polyloom.platform.engine.speculation.drafter import DraftRow, Proposal
from polyloom.routing.request import GenerationRequest
from polyloom.routing.scheduler.sequence import Sequence

DATA_DIR = Path.home() / ".cache/polyloom/test-base"
CONCURRENT = 32
LENGTHS = (1, 3, 7, 15, 31)
SLOW_SECONDS = 0.03
VOCABULARY = 49_000
PLANTED_LOADS, LOADS_AT_ONCE, ARRIVAL_ROUNDS = 20, 4, 12


class RandomDrafter:
    """Planted: proposes anything, and says that it is sure."""

    name = "random"
    needs_hidden = False
    looks_up = True

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def serves(self, sequence: Sequence) -> bool:
        return True

    def propose(self, rows: Seq[DraftRow]) -> list[Proposal]:
        lengths = [row.length for row in rows]
        drafts = [tuple(self._rng.randrange(VOCABULARY) for _ in range(n)) for n in lengths]
        return [Proposal(draft, (0.95,) * len(draft)) for draft in drafts]

    def close(self, sequence_id: str) -> None:
        """Keeps nothing."""


class SlowDrafter(RandomDrafter):
    """Planted: takes longer for a token than the base does."""

    name = "slow"
    looks_up = False

    def propose(self, rows: Seq[DraftRow]) -> list[Proposal]:
        time.sleep(SLOW_SECONDS * max(row.length for row in rows))
        return super().propose(rows)


def copying(base: Base) -> Workload:
    return Workload("copying", base.texts(COPIES))


def code_edits(base: Base) -> Workload:
    return Workload("code edits", base.texts(CODE_EDITS))


def prose(base: Base) -> Workload:
    return Workload("prose", base.texts(PROSE))


def ngram_bars(base: Base, rounds: int) -> Iterator[Bar]:
    """N-gram drafts where text repeats, over none, and against the best fixed length."""
    with base.drafting("ngram") as drafting:
        for workload in (copying(base), code_edits(base)):
            ratio = paired(drafting.engine, workload, "off", "adaptive", rounds)
            yield ratio.at_least(f"ngram on {workload.name}, times no drafts", 3.0)
        for workload in (copying(base), code_edits(base), prose(base)):
            yield against_best_fixed(drafting, workload, LENGTHS, rounds)
        yield controller_bar("one request", drafting)


def against_best_fixed(
    drafting: Drafting, workload: Workload, lengths: Seq[int], rounds: int
) -> Bar:
    """Every fixed length once to find the best; then adaptive by turns with that one."""
    engine = drafting.engine
    speeds = {length: pace(engine, workload, length).speed for length in (0, *lengths)}
    best = max(speeds, key=lambda length: speeds[length])
    ratio = paired(engine, workload, best, "adaptive", rounds)
    return ratio.at_least(
        f"adaptive on {workload.name}, times the best fixed length ({best})", 0.95
    )


def at_once_bars(base: Base) -> Iterator[Bar]:
    """Many requests at once, of which some repeat themselves."""
    kinds = (prose(base), copying(base))
    with base.drafting("ngram") as drafting:
        ratio = switched(drafting, [_at_once(kinds) for _ in range(1 + LOADS_AT_ONCE)])
        yield ratio.at_least(f"adaptive at {CONCURRENT}, times no drafts", 1.0)
        yield controller_bar(f"{CONCURRENT} requests", drafting)


def _at_once(kinds: Seq[Workload]) -> list[GenerationRequest]:
    cycled = itertools.cycle([(kind, prompt) for kind in kinds for prompt in kind.prompts])
    return [kind.request(p, "adaptive") for kind, p in itertools.islice(cycled, CONCURRENT)]


def planted_bars(base: Base) -> Iterator[Bar]:
    """A random and a slow drafter cost at most one percent."""
    workload = prose(base)
    prompts = list(itertools.islice(itertools.cycle(workload.prompts), 1 + PLANTED_LOADS))
    for drafter in (RandomDrafter(), SlowDrafter()):
        with base.drafting(planted=[drafter]) as drafting:
            ratio = switched(drafting, [[workload.request(p, "adaptive")] for p in prompts])
        yield ratio.at_least(f"a {drafter.name} drafter, times no drafts", 0.99)


def first_token_bar(drafting: Drafting, name: str, other: Workload, base: Base) -> Bar:
    """A prompt that comes while another request is answered with drafts."""
    ratio = first_tokens(drafting, other, copying(base), ARRIVAL_ROUNDS)
    return ratio.at_most(f"time to the first token beside {name}, times that without drafts", 1.02)


def controller_bar(name: str, drafting: Drafting) -> Bar:
    """Of all steps so far in which it was asked."""
    report = drafting.engine.speculation_report()
    share = report.controller_seconds / report.step_seconds
    return Bar(f"controller's share of the steps, {name}", f"{share:.2%}", "<= 1 %", share <= 0.01)


def bars(base: Base, rounds: int) -> Iterator[Bar]:
    """All of them, as they are measured."""
    yield from ngram_bars(base, rounds)
    yield from at_once_bars(base)
    yield from planted_bars(base)
    with base.drafting("ngram") as drafting:
        yield first_token_bar(drafting, "ngram", prose(base), base)


def real_base(threads: int = 2) -> Base:
    """SmolLM2, pulled where it is not there yet."""
    return Base(pull("smollm2-135m-instruct", DATA_DIR).folder, threads)


def main(description: str | None, bars: Callable[[Base, int], Iterator[Bar]]) -> int:
    """The command of a module whose `bars` are measured on SmolLM2 in so many rounds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return show_bars(bars(real_base(options.threads), options.rounds))


if __name__ == "__main__":
    sys.exit(main(__doc__, bars))
