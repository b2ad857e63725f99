"""Measures one way of drafting against another: engines, workloads, and pairs that share the noise.

What else the machine does must fall on both sides of a ratio. So two ways take turns request by
request (`paired`), or, where one percent counts, every few steps within the same requests
(`switched`, `first_tokens`).
"""

import contextlib
import gc
import itertools
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
BUSY_TOKENS = 512  # at most, of the request beside which others arrive
STEPS_BEFORE = 6  # an arrival
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
            gc.collect()
            gc.freeze()  # as in an engine's own process
            try:
                yield Drafting(engine, made[0])
            finally:
                gc.unfreeze()


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
        _submit(engine, work)
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


@dataclass
class FirstTokens:
    """What prompts that come meet, in seconds: the steps in which another request decodes, and from
    each arrival between two of them to its first token."""

    steps: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def expected(self) -> float:
        """Seconds to the first token of a prompt that comes at any moment: the rest of the step
        that it finds running, half of it but for long steps being met more often, and what comes
        after that."""
        rest = sum(s * s for s in self.steps) / (2 * sum(self.steps))
        return rest + statistics.mean(self.after)


class _Busy:
    """An engine in which a request of this workload decodes, another one whenever one has ended."""

    def __init__(self, drafting: Drafting, workload: Workload) -> None:
        self._drafting = drafting
        self._engine = drafting.engine
        self._workload = replace(workload, stop_token_ids=(), output_tokens=BUSY_TOKENS)
        self._prompts = itertools.cycle(workload.prompts)
        self._running: str | None = None

    def meet(self, prompt: GenerationRequest, drafts: bool, seen: FirstTokens) -> None:
        """Let the prompt come after some steps with drafts, or without."""
        self._drafting.speculator.on = drafts
        for _ in range(STEPS_BEFORE):
            while self._running is None:
                self._start()
            seen.steps.append(self._timed_step())
        started = time.perf_counter()
        _submit(self._engine, prompt)
        while prompt.sequence_id not in self._step():
            pass
        seen.after.append(time.perf_counter() - started)
        self._engine.abort(prompt.sequence_id)

    def end(self) -> None:
        """Leave the engine as it was."""
        self._drafting.speculator.on = True
        if self._running is not None:
            self._engine.abort(self._running)

    def _start(self) -> None:
        work = self._workload.request(next(self._prompts), "adaptive")
        _submit(self._engine, work)
        self._running = work.sequence_id
        while self._running is not None and work.sequence_id not in self._step():
            pass

    def _timed_step(self) -> float:
        started = time.perf_counter()
        self._step()
        return time.perf_counter() - started

    def _step(self) -> set[str]:
        """Which requests got tokens."""
        events = self._engine.step()
        for event in events:
            if isinstance(event, Finished) and event.sequence_id == self._running:
                self._running = None
        return {event.sequence_id for event in events if isinstance(event, Tokens)}


def first_tokens(drafting: Drafting, other: Workload, arriving: Workload, rounds: int) -> Ratio:
    """Time to the first token while another request drafts, to that while it does not: by turns
    beside the same request, over all prompts that arrive. The first round is not counted."""
    ratios, busy = [], _Busy(drafting, other)
    for turn in range(-1, rounds):
        sides = {False: FirstTokens(), True: FirstTokens()}
        for place, prompt in enumerate(arriving.prompts):
            for drafts in (False, True) if (turn + place) % 2 else (True, False):
                busy.meet(arriving.request(prompt, "adaptive"), drafts, sides[drafts])
        if turn >= 0:
            ratios.append(sides[True].expected / sides[False].expected)
    busy.end()
    return Ratio.median(ratios)


def _submit(engine: Engine, work: GenerationRequest) -> None:
    if (refused := engine.submit(work)) is not None:
        raise RuntimeError(f"refused: {refused.message}")
