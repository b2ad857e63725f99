"""Measures one way of drafting against another: engines, workloads, and pairs that share the noise.

What else the machine does must fall on both sides of a ratio. So two ways take turns request by
request (`paired`), or, where one percent counts, every few steps within the same requests
(`switched`).
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.bars import Bar
from benchmarks.in_process import Arrival, drive
from benchmarks.load import request
from examples.cases import Message
from polyloom.adapters.source import AdapterSource, DraftHeadSource
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.messages import Finished, Tokens
from polyloom.platform.engine.settings import DrafterName, EngineSettings
from polyloom.platform.engine.speculation.drafter import Drafter
from polyloom.platform.engine.speculation.speculator import DraftBlocks, Speculator
from polyloom.platform.engine.step import Engine
from polyloom.platform.generation.prompts import shipped_template
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.grammar import Grammar
from polyloom.routing.request import GenerationRequest
from polyloom.routing.scheduler.batch import StepPlan

DIGEST = "sha256:drafting"
BUSY_TOKENS = 32  # of another request, before one arrives
SWITCH_EVERY = 4  # steps: short beside what else the machine does

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """Requests of one kind, greedy; `name` is their domain.

    stop_token_ids: none: every answer has `output_tokens`.
    """

    name: str
    prompts: tuple[Prompt, ...]
    output_tokens: int = 96
    adapter: AdapterSource | None = None
    draft_head: DraftHeadSource | None = None
    grammar: Grammar | None = None
    stop_token_ids: tuple[int, ...] = ()

    def request(self, prompt: Prompt, drafts: DraftPolicy) -> GenerationRequest:
        work = request(DIGEST, self.adapter, prompt, self.output_tokens)
        return msgspec.structs.replace(
            work,
            drafts=drafts,
            domain=self.name,
            combination=msgspec.structs.replace(
                work.combination,
                head_digest=None if self.draft_head is None else self.draft_head.digest,
            ),
            draft_head=self.draft_head,
            grammar=self.grammar,
            sampling=msgspec.structs.replace(work.sampling, stop_token_ids=self.stop_token_ids),
        )


class Switchable(Speculator):
    """Drafts while `on`; else a plan passes as it would without drafters."""

    on = True

    def extend(self, plan: StepPlan) -> StepPlan:
        return super().extend(plan) if self.on else plan


@dataclass(frozen=True)
class Drafting:
    """An engine and its speculator."""

    engine: Engine
    speculator: Switchable


@dataclass(frozen=True)
class Base:
    """The real base: prompts as its tokenizer reads them, and engines over it."""

    folder: Path
    threads: int

    @property
    def tokenizer(self) -> TextTokenizer:
        return TextTokenizer(self.folder)

    @property
    def chat(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, shipped_template(self.folder))

    def texts(self, texts: Sequence[str]) -> tuple[Prompt, ...]:
        """Texts to go on with, as they stand."""
        tokenizer = self.tokenizer
        return tuple(tuple(tokenizer.encode_now(t, special_tokens=False)) for t in texts)

    def questions(self, questions: Sequence[str]) -> tuple[Prompt, ...]:
        """Questions to answer, in the base's own template."""
        chat = self.chat
        return tuple(rendered(chat, [{"role": "user", "content": text}]) for text in questions)

    @contextlib.contextmanager
    def drafting(
        self,
        *names: DrafterName,
        planted: Sequence[Drafter] = (),
        draft_model: Path | None = None,
        dtype: Literal["bfloat16", "float32"] = "bfloat16",
    ) -> Iterator[Drafting]:
        """An engine with these drafters alone. planted: others beside them."""
        made: list[Switchable] = []

        def speculator(drafters: Sequence[Drafter], blocks: DraftBlocks, budget: int) -> Switchable:
            made.append(Switchable((*drafters, *planted), blocks, budget))
            return made[-1]

        settings = EngineSettings(
            model_folder=str(self.folder),
            base_name="smollm2",
            base_digest=DIGEST,
            address="ipc:///unused",
            kv_memory=1 << 30,
            adapter_memory=64 << 20,
            threads=self.threads,
            dtype=dtype,
            prefix_cache=False,
            drafters=names,
            draft_model=None if draft_model is None else str(draft_model),
        )
        with contextlib.closing(build_engine(settings, speculator)) as engine:
            yield Drafting(engine, made[0])


def rendered(chat: ChatTemplate, messages: Iterable[Message]) -> Prompt:
    """A conversation that waits for its answer."""
    text = chat.tokenizer.transformers.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    return tuple(chat.tokenizer.encode_now(str(text), special_tokens=False))


@dataclass(frozen=True)
class Pace:
    """Decoded tokens, and the seconds that they took."""

    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Pace") -> "Pace":
        return Pace(self.tokens + other.tokens, self.seconds + other.seconds)

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Ratio:
    """B to A, by rounds; `value` is what they come to."""

    value: float
    rounds: tuple[float, ...]

    @classmethod
    def median(cls, rounds: Sequence[float]) -> "Ratio":
        return cls(statistics.median(rounds), tuple(rounds))

    def __str__(self) -> str:
        low, _, high = statistics.quantiles(self.rounds, n=4)
        return f"{self.value:.3f} [{low:.3f}, {high:.3f}]"

    def at_least(self, name: str, bound: float) -> Bar:
        return Bar(name, str(self), f">= {bound}", self.value >= bound)

    def at_most(self, name: str, bound: float) -> Bar:
        return Bar(name, str(self), f"<= {bound}", self.value <= bound)


def alone(engine: Engine, work: GenerationRequest) -> Pace:
    """One request by itself: what it decoded after its first token."""
    [stream] = drive(engine, [Arrival(0.0, work)]).streams.values()
    return Pace(len(stream.times) - 1, stream.times[-1] - stream.times[0])


def pace(engine: Engine, workload: Workload, drafts: DraftPolicy) -> Pace:
    """All requests of a workload, one after the other."""
    return sum((alone(engine, workload.request(p, drafts)) for p in workload.prompts), Pace())


def paired(
    engine: Engine, workload: Workload, a: DraftPolicy, b: DraftPolicy, rounds: int
) -> Ratio:
    """Speed by B to that by A, median of the rounds: A B, then B A, on each prompt of the workload.
    One round before them is not counted: drafting is learned in it."""
    ratios = []
    for turn in range(-1, rounds):
        paces: dict[DraftPolicy, Pace] = {a: Pace(), b: Pace()}
        for place, prompt in enumerate(workload.prompts):
            order = (a, b) if (turn + place) % 2 else (b, a)
            for drafts in order:
                paces[drafts] += alone(engine, workload.request(prompt, drafts))
        if turn >= 0:
            ratios.append(paces[b].speed / paces[a].speed)
    return Ratio.median(ratios)


def switched(drafting: Drafting, loads: Sequence[Sequence[GenerationRequest]]) -> Ratio:
    """Speed with drafts to that without, over all loads, within the same requests: drafting is
    switched every few steps, so both sides decode the same texts at the same time. The first load
    is not counted."""
    off, on, ratios = Pace(), Pace(), []
    for number, works in enumerate(loads):
        without, with_drafts = _switched_load(drafting, works)
        if number:
            off, on = off + without, on + with_drafts
            ratios.append(with_drafts.speed / without.speed)
    return Ratio(on.speed / off.speed, tuple(ratios))


def _switched_load(drafting: Drafting, works: Sequence[GenerationRequest]) -> tuple[Pace, Pace]:
    """Steps without and with drafts, from the one after which all requests decode."""
    engine, speculator = drafting.engine, drafting.speculator
    for work in works:
        if (refused := engine.submit(work)) is not None:
            raise RuntimeError(f"refused: {refused.message}")
    prefilling = {work.sequence_id for work in works}
    paces = [Pace(), Pace()]
    speculator.on = False
    for step in itertools.count():
        if not engine.has_work:
            break
        counted = not prefilling
        speculator.on = counted and step % (2 * SWITCH_EVERY) >= SWITCH_EVERY
        started = time.perf_counter()
        events = engine.step()
        seconds = time.perf_counter() - started
        if counted:
            paces[speculator.on] += Pace(_tokens(events), seconds)
        prefilling -= {e.sequence_id for e in events if isinstance(e, Tokens | Finished)}
    speculator.on = True
    return paces[False], paces[True]


def _tokens(events: Sequence[object]) -> int:
    return sum(len(event.token_ids) for event in events if isinstance(event, Tokens))


def first_token(engine: Engine, other: GenerationRequest, work: GenerationRequest) -> float:
    """Expected seconds to the first token of `work`, if it comes at any moment of the steps in
    which `other` decodes: the rest of the step that it finds running, half of it but for long steps
    being met more often, and what comes after that."""
    if refused := engine.submit(other):
        raise RuntimeError(f"refused: {refused.message}")
    tokens, steps = 0, list[float]()
    while tokens < BUSY_TOKENS:
        if not engine.has_work:
            raise RuntimeError(f"the other request ended after {tokens} tokens")
        started = time.perf_counter()
        came = _tokens(engine.step())
        if tokens:
            steps.append(time.perf_counter() - started)
        tokens += came
    started = time.perf_counter()
    engine.submit(work)
    while not any(
        isinstance(e, Tokens) and e.sequence_id == work.sequence_id for e in engine.step()
    ):
        pass
    seconds = time.perf_counter() - started
    engine.abort(other.sequence_id)
    engine.abort(work.sequence_id)
    return seconds + sum(s * s for s in steps) / (2 * sum(steps))


def first_token_paired(engine: Engine, other: Workload, arriving: Workload, rounds: int) -> Ratio:
    """Time to the first token while another request drafts, to that while it does not."""
    ratios, other = [], replace(other, stop_token_ids=(), output_tokens=4 * BUSY_TOKENS)
    for turn, busy in zip(range(-1, rounds), itertools.cycle(other.prompts), strict=False):
        for place, prompt in enumerate(arriving.prompts):
            times: dict[DraftPolicy, float] = {}
            for drafts in ("off", "adaptive") if (turn + place) % 2 else ("adaptive", "off"):
                work = arriving.request(prompt, drafts)
                times[drafts] = first_token(engine, other.request(busy, drafts), work)
            if turn >= 0:
                ratios.append(times["adaptive"] / times["off"])
    return Ratio.median(ratios)
