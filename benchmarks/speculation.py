"""Speculation's own bars: what n-gram drafts give where text repeats, and what drafting costs else.

    python -m benchmarks.speculation [--rounds 5]

SmolLM2 in bfloat16 in this process. Every figure is a ratio of two ways of drafting that take turns
on the same requests, A B A B, so that what else the machine does falls on both; shown are the
median of the rounds and the interval of the middle half.
"""

import argparse
import contextlib
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from benchmarks.bars import Bar, show_bars
from benchmarks.in_process import Arrival, Recording, drive
from benchmarks.load import request
from benchmarks.repeating_texts import CODE_EDITS, COPIES, PROSE
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.model.store import pull
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.speculation.drafter import Drafter, DraftRow, Proposal
from polyloom.platform.engine.speculation.ngram import NgramDrafter
from polyloom.platform.engine.speculation.speculator import DraftBlocks, Speculator
from polyloom.platform.engine.step import Engine
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.request import GenerationRequest
from polyloom.routing.scheduler.sequence import Sequence

DATA_DIR = Path.home() / ".cache/polyloom/test-base"
DIGEST = "sha256:speculation"
OUTPUT_TOKENS = 96
CONCURRENT = 32
FIXED = (1, 3, 7, 15, 31)
SLOW_SECONDS = 0.03
VOCABULARY = 49_000

_numbers = itertools.count()


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


@dataclass(frozen=True)
class Paired:
    """Ratios of B to A, round by round."""

    ratios: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    def __str__(self) -> str:
        low, _, high = statistics.quantiles(self.ratios, n=4)
        return f"{self.median:.3f} [{low:.3f}, {high:.3f}]"


class Bench:
    """One engine, and prompts as its tokenizer reads them."""

    def __init__(self, folder: Path, rounds: int, threads: int) -> None:
        self.rounds = rounds
        self._threads = threads
        self._folder = folder
        self._tokenizer = TextTokenizer(folder)

    @contextlib.contextmanager
    def engine(self, *drafters: Drafter) -> Iterator[Engine]:
        """An engine with these drafters alone."""

        def speculator(_: Seq[Drafter], blocks: DraftBlocks, budget: int) -> Speculator:
            return Speculator(drafters, blocks, budget)

        settings = EngineSettings(
            model_folder=str(self._folder),
            base_name="smollm2",
            base_digest=DIGEST,
            address="ipc:///unused",
            kv_memory=1 << 30,
            adapter_memory=64 << 20,
            threads=self._threads,
            prefix_cache=False,
        )
        with contextlib.closing(build_engine(settings, speculator)) as engine:
            yield engine

    def requests(self, texts: Seq[str], drafts: DraftPolicy) -> list[GenerationRequest]:
        prompts = [self._tokenizer.encode_now(text, special_tokens=False) for text in texts]
        return [
            msgspec.structs.replace(
                request(DIGEST, None, prompt, OUTPUT_TOKENS), drafts=drafts, domain=str(len(texts))
            )
            for prompt in prompts
        ]

    def one_by_one(self, engine: Engine, texts: Seq[str], drafts: DraftPolicy) -> float:
        """Tokens per second of decoding, one request at a time."""
        tokens, seconds = 0, 0.0
        for work in self.requests(texts, drafts):
            [stream] = drive(engine, [Arrival(0.0, work)]).streams.values()
            tokens += len(stream.times) - 1
            seconds += stream.times[-1] - stream.times[0]
        return tokens / seconds

    def at_once(self, engine: Engine, texts: Seq[str], drafts: DraftPolicy) -> float:
        """Tokens per second of CONCURRENT requests together."""
        several = list(itertools.islice(itertools.cycle(texts), CONCURRENT))
        recording = self._load(engine, several, drafts)
        return sum(len(s.times) for s in recording.streams.values()) / recording.seconds

    def first_token(self, engine: Engine, texts: Seq[str], drafts: DraftPolicy) -> float:
        """Median seconds to the first token of requests that arrive while another decodes."""
        times = []
        for text in texts:
            other, work = self.requests([PROSE[0], text], drafts)
            recording = drive(engine, [Arrival(0.0, other), Arrival(0.3, work)])
            times.append(recording.streams[work.sequence_id].first)
        return statistics.median(times)

    def paired(
        self, measure: Callable[[DraftPolicy], float], a: DraftPolicy, b: DraftPolicy
    ) -> Paired:
        """B to A by turns, the first turn of each not counted."""
        for policy in (a, b):
            measure(policy)
        return Paired(tuple(_turn(measure, a, b, swap) for swap in _swaps(self.rounds)))

    def _load(self, engine: Engine, texts: Seq[str], drafts: DraftPolicy) -> Recording:
        return drive(engine, [Arrival(0.0, work) for work in self.requests(texts, drafts)])


def _swaps(rounds: int) -> list[bool]:
    return [bool(turn % 2) for turn in range(rounds)]


def _turn(
    measure: Callable[[DraftPolicy], float], a: DraftPolicy, b: DraftPolicy, swap: bool
) -> float:
    if swap:
        after, before = measure(b), measure(a)
        return after / before
    before = measure(a)
    return measure(b) / before


def repeating_bars(bench: Bench) -> Iterator[Bar]:
    """N-gram drafts where text repeats: over none, against the best fixed length, at 32."""
    with bench.engine(NgramDrafter()) as engine:
        for name, texts in (("copying", COPIES), ("code edits", CODE_EDITS)):
            times = bench.paired(
                lambda drafts, texts=texts: bench.one_by_one(engine, texts, drafts),  # type: ignore[misc]
                "off",
                "adaptive",
            )
            yield _at_least(f"ngram on {name}, times no drafts", times, 3.0)
        for name, texts in (("copying", COPIES), ("prose", PROSE)):
            yield _against_best_fixed(bench, engine, name, texts)
        many = bench.paired(
            lambda d: bench.at_once(engine, [*PROSE, *COPIES], d), "off", "adaptive"
        )
        yield _at_least(f"adaptive at {CONCURRENT}, times no drafts", many, 1.0)
        first = bench.paired(lambda d: bench.first_token(engine, COPIES, d), "off", "adaptive")
        yield Bar(
            "time to the first token, times that without drafts",
            str(first),
            "<= 1.02",
            first.median <= 1.02,
        )
        report = engine.speculation_report()
        share = report.controller_seconds / report.step_seconds
        yield Bar("controller's share of the steps", f"{share:.2%}", "<= 1 %", share <= 0.01)


def _against_best_fixed(bench: Bench, engine: Engine, name: str, texts: Seq[str]) -> Bar:
    """Every fixed length once to find the best; then adaptive by turns with that one."""
    speeds = {k: bench.one_by_one(engine, texts, k) for k in (0, *FIXED)}
    best = max(speeds, key=lambda k: speeds[k])
    ratio = bench.paired(lambda d: bench.one_by_one(engine, texts, d), best, "adaptive")
    return _at_least(f"adaptive on {name}, times the best fixed length ({best})", ratio, 0.95)


def planted_bars(bench: Bench) -> Iterator[Bar]:
    """A random and a slow drafter cost at most one percent."""
    for drafter in (RandomDrafter(), SlowDrafter()):
        with bench.engine(drafter) as engine:
            for policy in ("off", "adaptive"):  # it is learned once that they bring nothing
                bench.one_by_one(engine, PROSE, policy)
            loss = bench.paired(lambda d: bench.one_by_one(engine, PROSE, d), "off", "adaptive")
        yield _at_least(f"a {drafter.name} drafter, times no drafts", loss, 0.99)


def _at_least(name: str, ratio: Paired, bound: float) -> Bar:
    return Bar(name, str(ratio), f">= {bound}", ratio.median >= bound)


def bars(rounds: int, threads: int = 2) -> Iterator[Bar]:
    """All of them, as they are measured."""
    bench = Bench(pull("smollm2-135m-instruct", DATA_DIR).folder, rounds, threads)
    yield from repeating_bars(bench)
    yield from planted_bars(bench)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return show_bars(bars(options.rounds, options.threads))


if __name__ == "__main__":
    sys.exit(main())
