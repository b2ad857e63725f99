"""What draft heads give each example adapter on its own held-out prompts, one request at a time.

    python -m benchmarks.draft_heads --base FOLDER [--prompts 12] [--drafts 3]

For each adapter the same greedy answers are made without drafts, with n-grams, with the base's
shared head and with the adapter's own, interleaved prompt by prompt. Acceptance length is tokens a
decode step; the texts must be equal up to near ties, and the share of equal ones is shown.
"""

import argparse
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.bars import Bar, show_bars
from benchmarks.drafting import Base, Workload, alone, rendered
from benchmarks.speculation import against_best_fixed, first_token_bar
from examples.draft_prompts import prompts
from examples.tasks import TASKS
from polyloom.adapters.draft_heads.checkpoint import read_draft_head
from polyloom.adapters.source import AdapterSource, DraftHeadSource
from polyloom.adapters.validation import load_adapter_weights
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.messages import Finished, Tokens
from polyloom.platform.engine.model.layout import base_layout
from polyloom.platform.engine.model.store import BaseModel, pull
from polyloom.platform.engine.model.weights import FusedWeights
from polyloom.platform.engine.settings import DrafterName, EngineSettings
from polyloom.platform.engine.step import Engine
from polyloom.platform.generation.prompts import shipped_template
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.routing.combination import Combination
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams

EXAMPLES = Path(__file__).parent.parent / "examples"
SHARED = "smollm2-135m-instruct"
ACCEPTANCE_BAR, OVER_SHARED_BAR, SPEED_BAR = 2.2, 1.15, 1.4
DOMAIN, DOMAIN_PROMPTS, DOMAIN_LENGTHS = "text-to-sql", 4, (1, 2, 3)
MODES = ("none", "ngram", "shared head", "own head")


@dataclass
class Tally:
    """One way of drafting on one adapter's prompts."""

    tokens: int = 0
    steps: int = 0
    seconds: list[float] = field(default_factory=list)
    equal: int = 0

    @property
    def acceptance_length(self) -> float:
        return self.tokens / max(1, self.steps)

    @property
    def speed(self) -> float:
        """Tokens a second of decoding."""
        return self.tokens / sum(self.seconds)


class Bench:
    """An engine for each set of drafters, over one base."""

    def __init__(self, base: BaseModel, threads: int, drafts: int, num_prompts: int) -> None:
        self._base = base
        self._num_prompts = num_prompts
        self._drafts = drafts
        self._format = ChatTemplate(TextTokenizer(base.folder), shipped_template(base.folder))
        none: tuple[DrafterName, ...] = ()
        sets = {"none": none, "ngram": ("ngram",), "head": ("draft_head",)}
        self._engines = {name: self._engine(drafters, threads) for name, drafters in sets.items()}
        layout = base_layout(
            base.config, name=base.name, digest=base.digest, other_names=base.names
        )
        self._layout, self._weights = layout, FusedWeights(base.folder, base.config, torch.float32)
        self._ids = 0

    def adapter(self, task: str) -> dict[str, Tally]:
        """All ways of drafting on this adapter; the first prompt warms up and does not count."""
        folder = EXAMPLES / "adapters" / task
        digest = load_adapter_weights(folder, self._layout, self._weights, None).digest
        adapter = AdapterSource(digest, str(folder))
        tallies = {mode: Tally() for mode in MODES}
        for number, prompt in enumerate(self._prompts(task)):
            answers: dict[str, list[int]] = {}
            for mode in MODES:
                request = self._request(prompt, adapter, _head(task, mode))
                tokens, steps, seconds = _decode(self._engines[_set(mode)], request)
                answers[mode] = tokens
                if number:
                    tally = tallies[mode]
                    tally.tokens += len(tokens) - 1
                    tally.steps += steps
                    tally.seconds.append(seconds)
                    tally.equal += tokens == answers["none"]
        return tallies

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _prompts(self, task: str) -> Iterator[tuple[int, ...]]:
        for messages in prompts(task, "held_out")[: self._num_prompts + 1]:
            yield rendered(self._format, messages)

    def _request(
        self, prompt: tuple[int, ...], adapter: AdapterSource, head: DraftHeadSource | None
    ) -> GenerationRequest:
        self._ids += 1
        return GenerationRequest(
            sequence_id=str(self._ids),
            tenant="bench",
            combination=Combination(
                self._base.digest, "", adapter.digest, None if head is None else head.digest
            ),
            adapter=adapter,
            draft_head=head,
            prompt=prompt,
            sampling=SamplingParams(
                max_tokens=64,
                seed=0,
                temperature=0.0,
                stop_token_ids=self._base.eos_token_ids,
            ),
            drafts=self._drafts,
        )

    def _engine(self, drafters: tuple[DrafterName, ...], threads: int) -> Engine:
        return build_engine(
            EngineSettings(
                model_folder=str(self._base.folder),
                base_name=self._base.name,
                base_digest=self._base.digest,
                address="ipc:///nowhere",
                kv_memory=1 << 27,
                adapter_memory=1 << 26,
                threads=threads,
                prefix_cache=False,
                drafters=drafters,
            )
        )


def with_heads() -> list[str]:
    return [task for task in TASKS if (EXAMPLES / "draft_heads" / task).is_dir()]


def _set(mode: str) -> str:
    return "head" if mode.endswith("head") else mode


def _head(task: str, mode: str) -> DraftHeadSource | None:
    if not mode.endswith("head"):
        return None
    folder = EXAMPLES / "draft_heads" / task
    own = AdapterSource(read_draft_head(folder).digest, str(folder))
    return DraftHeadSource(shared_head().shared, own if mode == "own head" else None)


def shared_head() -> DraftHeadSource:
    """The base's."""
    folder = EXAMPLES / "draft_heads" / SHARED
    return DraftHeadSource(AdapterSource(read_draft_head(folder).digest, str(folder)))


def _decode(engine: Engine, request: GenerationRequest) -> tuple[list[int], int, float]:
    """The answer's tokens, the decode steps after the first token, and their seconds."""
    if engine.submit(request) is not None:
        raise RuntimeError("the engine refused a request")
    tokens: list[int] = []
    steps, started = 0, 0.0
    while engine.has_work:
        events = engine.step()
        if tokens:
            steps += 1
        for event in events:
            if isinstance(event, Tokens):
                started = started or time.perf_counter()
                tokens += event.token_ids
            elif isinstance(event, Finished) and event.stop_token is not None:
                tokens.append(event.stop_token)
    return tokens, steps, time.perf_counter() - started


def bars(tallies: dict[str, dict[str, Tally]]) -> Iterator[Bar]:
    """What each adapter's own head has to reach on its own prompts."""
    for task, ways in tallies.items():
        own, shared, none = ways["own head"], ways["shared head"], ways["none"]
        measured = (
            ("acceptance length", own.acceptance_length, ACCEPTANCE_BAR, ""),
            ("times the shared head's speed", own.speed / shared.speed, OVER_SHARED_BAR, "×"),
            ("times the speed without drafts", own.speed / none.speed, SPEED_BAR, "×"),
        )
        for name, figure, bar, unit in measured:
            ok = figure >= bar
            yield Bar(f"{task}, {name}", f"{figure:.2f}{unit}", f"≥ {bar}{unit}", ok)


def measured(bench: Bench, tasks: Sequence[str], num_prompts: int) -> Iterator[Bar]:
    """The table of all ways of drafting on each adapter, printed as it is measured; then bars."""
    results = {}
    print("| adapter | drafts by | tokens a step | tokens/s | equal texts |")
    print("| --- | --- | ---: | ---: | ---: |")
    for task in tasks:
        results[task] = bench.adapter(task)
        for mode, tally in results[task].items():
            print(
                f"| {task} | {mode} | {tally.acceptance_length:.2f} | {tally.speed:.1f} |"
                f" {tally.equal} of {num_prompts} |",
                flush=True,
            )
    yield from bars(results)


def own_domain(base: BaseModel, task: str, drafting: Base) -> Workload:
    """An adapter's held-out prompts, with its own head."""
    folder = EXAMPLES / "adapters" / task
    layout = base_layout(base.config, name=base.name, digest=base.digest, other_names=base.names)
    weights = FusedWeights(base.folder, base.config, torch.float32)
    digest = load_adapter_weights(folder, layout, weights, None).digest
    questions = prompts(task, "held_out")[:DOMAIN_PROMPTS]
    return Workload(
        task,
        tuple(rendered(drafting.chat, messages) for messages in questions),
        output_tokens=64,
        adapter=AdapterSource(digest, str(folder)),
        draft_head=_head(task, "own head"),
        stop_token_ids=base.eos_token_ids,
    )


def adaptive_bars(base: BaseModel, drafting_base: Base, rounds: int) -> Iterator[Bar]:
    """The controller with an adapter's own head."""
    workload = own_domain(base, DOMAIN, drafting_base)
    with drafting_base.drafting("draft_head") as drafting:
        alone(drafting.engine, workload.request(workload.prompts[0], "adaptive"))  # loads the head
        yield against_best_fixed(drafting, workload, DOMAIN_LENGTHS, rounds)
        yield first_token_bar(drafting, "draft head", workload, drafting_base)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure draft heads on the example adapters.")
    parser.add_argument("--base", default=SHARED, help="a known name, a folder or a hub id")
    parser.add_argument("--data-dir", type=Path, default=Path.home() / ".local/share/polyloom")
    parser.add_argument(
        "--task", choices=list(TASKS), action="append", help="default: all with a head"
    )
    parser.add_argument("--prompts", type=int, default=12, help="of each adapter")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    base = pull(arguments.base, arguments.data_dir)
    bench = Bench(base, arguments.threads, arguments.drafts, arguments.prompts)
    with contextlib.closing(bench):
        tasks = arguments.task or with_heads()
        return show_bars(measured(bench, tasks, arguments.prompts))


if __name__ == "__main__":
    raise SystemExit(main())
