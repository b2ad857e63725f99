"""Parity: random mixes through the engine, every answer held to PEFT on its adapter alone, in fp32.

    python -m benchmarks.parity tiny --requests 2000
    python -m benchmarks.parity smollm2 --requests 120

The engine is made tight on purpose: few blocks, so that sequences are preempted; a small token
budget, so that prompts are chunked; adapters that come and go. Exit status 1 when a token is wrong
or a logprob is off by more than 1e-3.
"""

import argparse
import contextlib
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.adapters import MIXED_SHAPES, make_adapters
from benchmarks.load import request
from benchmarks.reference import Answer, Oracle
from polyloom.adapters.source import AdapterSource
from polyloom.adapters.validation import ValidationLimits, validate
from polyloom.kvcache.kernels.dispatch import logger as kernels_logger
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.messages import Finished, Tokens
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.layout import base_layout
from polyloom.platform.engine.model.store import pull
from polyloom.platform.engine.model.weights import FusedWeights
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.step import Engine
from polyloom.routing.request import GenerationRequest

LOGPROB_BOUND = 1e-3
BASE_DIGEST = "sha256:parity"


@dataclass(frozen=True)
class Case:
    """One request of the mix; adapter is an index, None for the base alone."""

    adapter: int | None
    work: GenerationRequest


@dataclass(frozen=True)
class ParityReport:
    """The whole run."""

    cases: int
    base_cases: int
    adapters: int
    tokens: int
    steps: int
    preemptions: int
    chunked: int
    largest_difference: float
    wrong: int
    near_ties: int

    @property
    def ok(self) -> bool:
        return self.wrong == 0 and self.largest_difference <= LOGPROB_BOUND

    def __str__(self) -> str:
        return (
            f"{self.cases} requests ({self.base_cases} base, the rest over {self.adapters} "
            f"adapters), {self.tokens} tokens in {self.steps} steps, {self.chunked} prompts "
            f"chunked, {self.preemptions} preemptions: largest logprob difference "
            f"{self.largest_difference:.2e}, wrong tokens {self.wrong}, near ties {self.near_ties}"
        )


def sources(base: Path, folders: Sequence[Path]) -> tuple[AdapterSource, ...]:
    """Validate adapter folders as an upload is validated."""
    config = read_config(base)
    layout = base_layout(config, name=str(base), digest=BASE_DIGEST)
    weights = FusedWeights(base, config, torch.float32)
    return tuple(
        AdapterSource(validate(f, layout, weights, ValidationLimits()).digest, str(f))
        for f in folders
    )


def engine_settings(base: Path, *, kv_memory: int, token_budget: int) -> EngineSettings:
    """fp32 and tight."""
    return EngineSettings(
        model_folder=str(base),
        base_name=str(base),
        base_digest=BASE_DIGEST,
        address="ipc:///unused",
        kv_memory=kv_memory,
        adapter_memory=512 << 20,
        threads=2,
        dtype="float32",
        token_budget=token_budget,
        max_running=16,
        queue_limit=100_000,
    )


def random_cases(
    count: int, vocab: int, adapters: Sequence[AdapterSource], seed: int, temperature: float = 0.0
) -> list[Case]:
    """Prompts of 1–96 tokens, answers of 1–24, on a random adapter or (1 in 8) the base."""
    rng = random.Random(seed)
    cases = []
    for index in range(count):
        adapter = None if rng.random() < 1 / 8 else rng.randrange(len(adapters))
        prompt = [rng.randrange(vocab) for _ in range(rng.randint(1, 96))]
        work = request(
            BASE_DIGEST,
            None if adapter is None else adapters[adapter],
            prompt,
            rng.randint(1, 24),
            temperature=temperature,
            seed=index,
            logprobs=0,
        )
        cases.append(Case(adapter, work))
    return cases


def drive(engine: Engine, cases: Sequence[Case], seed: int) -> dict[str, Answer]:
    """Submit at random moments, step until all have ended; answers by sequence id."""
    rng, waiting = random.Random(seed), list(reversed(cases))
    tokens: dict[str, list[int]] = {case.work.sequence_id: [] for case in cases}
    logprobs: dict[str, list[float]] = {case.work.sequence_id: [] for case in cases}
    while waiting or engine.has_work:
        for _ in range(rng.choice((0, 0, 1, 1, 2, 6))):
            if waiting and (refused := engine.submit(waiting.pop().work)):
                raise RuntimeError(f"refused: {refused.message}")
        for event in engine.step():
            match event:
                case Tokens():
                    tokens[event.sequence_id] += event.token_ids
                    logprobs[event.sequence_id] += [e.logprob or 0.0 for e in event.logprobs]
                case Finished(reason=reason) if reason != "length":
                    raise RuntimeError(f"{event.sequence_id} ended with {reason}: {event.error}")
    engine.check_idle()
    return {
        case.work.sequence_id: Answer(
            case.work.prompt,
            tuple(tokens[case.work.sequence_id]),
            tuple(logprobs[case.work.sequence_id]),
        )
        for case in cases
    }


def run_parity(
    base: Path, count: int, kv_memory: int, token_budget: int, seed: int = 0
) -> ParityReport:
    """The whole comparison on one base."""
    with tempfile.TemporaryDirectory(prefix="polyloom-parity-") as folder:
        folders = make_adapters(base, Path(folder), MIXED_SHAPES)
        engine = build_engine(engine_settings(base, kv_memory=kv_memory, token_budget=token_budget))
        with contextlib.closing(engine):
            vocab = read_config(base).vocab_size
            cases = random_cases(count, vocab, sources(base, folders), seed)
            answers = drive(engine, cases, seed)
            status = engine.status()
        return _report(
            base, folders, cases, answers, status.steps, status.preemptions_total, token_budget
        )


def _report(
    base: Path,
    folders: Sequence[Path],
    cases: Sequence[Case],
    answers: dict[str, Answer],
    steps: int,
    preemptions: int,
    token_budget: int,
) -> ParityReport:
    oracle, comparisons = Oracle(base), []
    for adapter in (None, *range(len(folders))):
        mine = [answers[c.work.sequence_id] for c in cases if c.adapter == adapter]
        comparisons += oracle.compare(None if adapter is None else folders[adapter], mine)
    return ParityReport(
        cases=len(comparisons),
        base_cases=sum(case.adapter is None for case in cases),
        adapters=len(folders),
        tokens=sum(len(answer.tokens) for answer in answers.values()),
        steps=steps,
        preemptions=preemptions,
        chunked=sum(len(case.work.prompt) > token_budget for case in cases),
        largest_difference=max(c.difference for c in comparisons),
        wrong=sum(c.wrong for c in comparisons),
        near_ties=sum(c.near_ties for c in comparisons),
    )


@contextlib.contextmanager
def tiny_base() -> Iterator[Path]:
    """A random Llama of three layers, grouped heads and a tied head."""
    with tempfile.TemporaryDirectory(prefix="polyloom-tiny-") as folder:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=384,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.1,
            tie_word_embeddings=True,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        yield Path(folder)


def run_tiny(count: int) -> ParityReport:
    """About 30 blocks of 16 tokens."""
    with tiny_base() as base:
        return run_parity(base, count, kv_memory=30 * 16 * 3 * 2 * 2 * 16 * 4, token_budget=48)


def run_smollm2(count: int, data_dir: Path) -> ParityReport:
    """The real base; about 40 blocks."""
    base = pull("smollm2-135m-instruct", data_dir).folder
    return run_parity(base, count, kv_memory=40 * 16 * 30 * 2 * 3 * 64 * 4, token_budget=64)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("base", choices=("tiny", "smollm2"))
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--data-dir", type=Path, default=Path.home() / ".cache/polyloom/test-base")
    options = parser.parse_args()
    torch.set_num_threads(2)
    kernels_logger.setLevel("ERROR")
    if options.base == "tiny":
        report = run_tiny(options.requests)
    else:
        report = run_smollm2(options.requests, options.data_dir)
    print(f"{options.base}: {report}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
