"""One seed, one text: sampled requests alone, and in a tight, chunked, preempting batch, in fp32.

    python -m benchmarks.seeds --requests 300 [--drafts adaptive|latency|off|1…31]

Where two texts part, the oracle recomputes that position with its noise: a gap of the two best
scores under 1e-4 is a near tie and counted, anything else is a failure.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks.adapters import MIXED_SHAPES, make_adapters
from benchmarks.parity import Case, drive, engine_settings, random_cases, sources, tiny_base
from benchmarks.reference import NEAR_TIE, Answer, Oracle
from polyloom.kvcache.kernels.dispatch import logger as kernels_logger
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.noise import draw_key, exponentials
from polyloom.routing.drafts import DraftPolicy

TEMPERATURE = 0.9
TINY_BLOCK_BYTES = 16 * 3 * 2 * 2 * 16 * 4


@dataclass(frozen=True)
class SeedReport:
    """Texts alone against texts in the batch."""

    cases: int
    equal: int
    near_ties: int
    preemptions: int

    @property
    def ok(self) -> bool:
        return self.equal + self.near_ties == self.cases

    def __str__(self) -> str:
        return (
            f"{self.cases} sampled requests alone and batched ({self.preemptions} preemptions): "
            f"{self.equal} equal, {self.near_ties} part at a near tie, "
            f"{self.cases - self.equal - self.near_ties} differ"
        )


def run_seeds(count: int, seed: int = 1, drafts: DraftPolicy = "adaptive") -> SeedReport:
    """On a random Llama with seventeen adapters. drafts: of the batch; alone there are none."""
    with tiny_base() as base, tempfile.TemporaryDirectory(prefix="polyloom-seeds-") as folder:
        folders = make_adapters(base, Path(folder), MIXED_SHAPES)
        adapters = sources(base, folders)
        vocab = read_config(base).vocab_size
        plain = random_cases(count, vocab, adapters, seed, temperature=TEMPERATURE)
        cases = [_drafting(case, "off") for case in plain]
        tight = engine_settings(base, kv_memory=30 * TINY_BLOCK_BYTES, token_budget=40)
        roomy = engine_settings(base, kv_memory=400 * TINY_BLOCK_BYTES, token_budget=512)
        with contextlib.closing(build_engine(tight)) as engine:
            batched = drive(engine, [_drafting(case, drafts) for case in plain], seed)
            preemptions = engine.status().preemptions_total
        with contextlib.closing(build_engine(roomy)) as engine:
            alone = {}
            for case in cases:
                alone |= drive(engine, [case], seed)
        differing = [c for c in cases if _tokens(batched, c) != _tokens(alone, c)]
        oracle = Oracle(base)
        ties = sum(
            _near_tie(oracle, folders, case, _tokens(alone, case), _tokens(batched, case))
            for case in differing
        )
        return SeedReport(count, count - len(differing), ties, preemptions)


def _drafting(case: Case, drafts: DraftPolicy) -> Case:
    return replace(case, work=msgspec.structs.replace(case.work, drafts=drafts))


def _policy(text: str) -> DraftPolicy:
    if text.isdecimal():
        return int(text)
    return msgspec.convert(text, DraftPolicy)  # type: ignore[no-any-return]


def _tokens(answers: dict[str, Answer], case: Case) -> tuple[int, ...]:
    return answers[case.work.sequence_id].tokens


def _near_tie(
    oracle: Oracle,
    folders: Sequence[Path],
    case: Case,
    alone: tuple[int, ...],
    batched: tuple[int, ...],
) -> bool:
    """Whether the two best scores, noise included, are as good as equal where the texts part."""
    position = next(i for i, (a, b) in enumerate(zip(alone, batched, strict=True)) if a != b)
    adapter = None if case.adapter is None else folders[case.adapter]
    logits = oracle.next_logits(adapter, case.work.prompt + alone[:position])
    sampling = case.work.sampling
    key = draw_key(sampling.seed, sampling.choice, position)
    noise = exponentials(key, np.arange(logits.size, dtype=np.uint32))
    scores = np.sort(logits.astype(np.float64) / sampling.temperature - np.log(noise))
    return bool(scores[-1] - scores[-2] < NEAR_TIE)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--drafts", type=_policy, default="adaptive")
    options = parser.parse_args()
    torch.set_num_threads(2)
    kernels_logger.setLevel("ERROR")
    report = run_seeds(options.requests, drafts=options.drafts)
    print(f"seeds: {report}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
