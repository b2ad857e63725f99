"""One seed, one text: sampled requests alone, and in a tight, chunked, preempting batch, in fp32.

    python -m benchmarks.seeds --requests 300 [--drafts adaptive|latency|off|1…31]

Where two texts part, the oracle recomputes that position with its noise: a gap of the two best
scores under 1e-4 is a near tie and counted, anything else is a failure.
"""

import argparse
import contextlib
import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import torch

from benchmarks import draft_heads, draft_model, json_drafts
from benchmarks.adapters import MIXED_SHAPES, make_adapters
from benchmarks.drafting import Base, Workload
from benchmarks.parity import Case, drive, engine_settings, random_cases, sources, tiny_base
from benchmarks.reference import NEAR_TIE, Answer, Oracle
from benchmarks.speculation import DATA_DIR, copying
from polyloom.kvcache.kernels.dispatch import logger as kernels_logger
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.messages import Tokens
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.store import pull
from polyloom.platform.engine.noise import draw_key, exponentials
from polyloom.platform.engine.settings import DrafterName
from polyloom.platform.engine.step import Engine
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.request import GenerationRequest

TEMPERATURE = 0.9
REAL_TOKENS = 32
REAL_POLICIES: tuple[DraftPolicy, ...] = ("adaptive", 3, 7, "latency", 1, 31, 2)
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
            _near_tie(
                oracle,
                None if case.adapter is None else folders[case.adapter],
                case.work,
                _tokens(alone, case),
                _tokens(batched, case),
            )
            for case in differing
        )
        return SeedReport(count, count - len(differing), ties, preemptions)


def run_real_seeds(base: Base, count: int) -> SeedReport:
    """On SmolLM2 with every drafter: text that repeats, everyday questions, JSON and an adapter's own
    domain, each request with its own way of drafting. Alone there are none."""
    kinds = _real_workloads(base)
    works = [
        _sampled(kind, kind.prompts[index // len(kinds) % len(kind.prompts)], index)
        for index, kind in zip(range(count), itertools.cycle(kinds), strict=False)
    ]
    everyone: tuple[DrafterName, ...] = ("ngram", "draft_head", "grammar")
    copy = draft_model.copy_of(base)
    with base.drafting(*everyone, draft_model=copy, dtype="float32") as drafting:
        alone = {}
        for work in works:
            alone |= _texts(drafting.engine, [msgspec.structs.replace(work, drafts="off")])
        batched = _texts(drafting.engine, works)
    differing = [w for w in works if alone[w.sequence_id] != batched[w.sequence_id]]
    oracle = Oracle(base.folder)
    ties = sum(
        work.grammar is None  # what a grammar leaves of the scores is not recomputed
        and _near_tie(
            oracle,
            None if work.adapter is None else Path(work.adapter.path),
            work,
            alone[work.sequence_id],
            batched[work.sequence_id],
        )
        for work in differing
    )
    return SeedReport(count, count - len(differing), ties, 0)


def _real_workloads(base: Base) -> tuple[Workload, ...]:
    model = pull("smollm2-135m-instruct", DATA_DIR)
    return (
        copying(base),
        replace(draft_model.everyday(base), draft_head=draft_heads.shared_head()),
        json_drafts.json_answers(base, draft_heads.shared_head()),
        draft_heads.own_domain(model, draft_heads.DOMAIN, base),
    )


def _sampled(kind: Workload, prompt: tuple[int, ...], index: int) -> GenerationRequest:
    work = kind.request(prompt, REAL_POLICIES[index % len(REAL_POLICIES)])
    sampling = msgspec.structs.replace(
        work.sampling, temperature=TEMPERATURE, seed=index, max_tokens=REAL_TOKENS
    )
    return msgspec.structs.replace(work, sampling=sampling)


def _texts(engine: Engine, works: Sequence[GenerationRequest]) -> dict[str, tuple[int, ...]]:
    """Tokens by sequence id, of all at once."""
    texts: dict[str, list[int]] = {}
    for work in works:
        texts[work.sequence_id] = []
        if refused := engine.submit(work):
            raise RuntimeError(f"refused: {refused.message}")
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Tokens):
                texts[event.sequence_id] += event.token_ids
    return {name: tuple(tokens) for name, tokens in texts.items()}


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
    adapter: Path | None,
    work: GenerationRequest,
    alone: tuple[int, ...],
    batched: tuple[int, ...],
) -> bool:
    """Whether the two best scores, noise included, are as good as equal where the texts part."""
    pairs = enumerate(zip(alone, batched, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(alone), len(batched)))
    logits = oracle.next_logits(adapter, work.prompt + alone[:position])
    sampling = work.sampling
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
