"""One request in the engine: the sequences of its choices, merged into one stream of text."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from polyloom.platform.engine.errors import EngineError, EngineUnavailableError
from polyloom.platform.engine.messages import CacheOutcome, Finished, TokenLogprob, Tokens
from polyloom.platform.generation.output_text import OutputText, TextToken
from polyloom.platform.generation.refusals import of_end, of_engine
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.routing.request import GenerationRequest

logger = logging.getLogger(__name__)

SequenceEvent = Tokens | Finished


class SequenceEngine(Protocol):
    """What a run needs of `EngineClient`."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[SequenceEvent, None]:
        """Submit, then events in order, `Finished` last. Closing it early aborts the sequence.
        Raises EngineError."""
        ...

    async def abort(self, sequence_id: str) -> None:
        """End a sequence; its `Finished(reason="abort")` follows. Raises EngineUnavailableError."""
        ...


@dataclass(frozen=True)
class RunPlan:
    """Sequences of one request in the order of its choices, all of one combination.

    echo: prompt texts to put before the answers, one a prompt; empty for no echo.
    prompt_only: the client wants the echoed prompt alone (`max_tokens` 0).
    shown: special tokens that are part of the text.
    """

    sequences: tuple[GenerationRequest, ...]
    tokenizer: TextTokenizer
    stops: tuple[str, ...] = ()
    choices_per_prompt: int = 1
    echo: tuple[str, ...] = ()
    prompt_only: bool = False
    shown: frozenset[int] = frozenset()

    def echo_of(self, index: int) -> str:
        """The prompt text before choice `index`, empty without echo."""
        return self.echo[index // self.choices_per_prompt] if self.echo else ""


@dataclass(frozen=True)
class ChoiceDelta:
    """News of one choice. Offsets of `tokens` count from the start of the choice's whole text."""

    index: int
    text: str
    tokens: tuple[TextToken, ...] = ()
    finish_reason: str | None = None


@dataclass
class RunTotals:
    """What the request used, over its choices. Times in seconds since arrival in the engine.

    accepted_tokens, rejected_tokens: of drafts.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_tokens: int = 0
    rejected_tokens: int = 0
    queue_time: float = 0.0
    first_token: float | None = None
    finished: float = 0.0
    finish_reasons: list[str] = field(default_factory=list)
    cache: list[tuple[GenerationRequest, CacheOutcome]] = field(default_factory=list)

    def saw_first(self, seconds: float) -> None:
        """A choice had its first token; the earliest counts."""
        self.first_token = seconds if self.first_token is None else min(self.first_token, seconds)


class _Choice:
    """One sequence and the text made of it."""

    def __init__(self, plan: RunPlan, index: int) -> None:
        self.request = plan.sequences[index]
        self.index = index
        self._plan = plan
        self._echo: str | None = plan.echo_of(index) if plan.echo else None
        self._start = len(self._echo or "")
        self.first_seen: float | None = None  # monotonic
        self._output = OutputText(
            plan.tokenizer, plan.stops, self.request.sampling.min_tokens, plan.shown
        )

    @property
    def stopped(self) -> bool:
        return self._output.stopped is not None

    @property
    def tokens_seen(self) -> int:
        return self._output.tokens_seen

    def take(self, event: Tokens) -> ChoiceDelta | None:
        """What the tokens make visible; tokens after a stop string are not looked at."""
        if event.token_ids and self.first_seen is None:
            self.first_seen = time.monotonic()
        text, shown = self._take_echo(event.prompt_logprobs)
        for position, token_id in enumerate(event.token_ids):
            if self.stopped:
                break
            delta = self._output.push(
                token_id, event.logprobs[position] if event.logprobs else None
            )
            if not self._plan.prompt_only:
                text += delta.text
                shown += self._shifted(delta.tokens)
        if not (text or shown or self.stopped):
            return None
        return ChoiceDelta(self.index, text, tuple(shown), "stop" if self.stopped else None)

    def finish(self, event: Finished) -> ChoiceDelta:
        """The rest of the text, with the reason of the end."""
        text, shown = self._take_echo(())
        delta = self._output.finish()
        if not self._plan.prompt_only:
            text += delta.text
            shown += self._shifted(delta.tokens)
        reason = "cancelled" if event.reason == "abort" else event.reason
        return ChoiceDelta(self.index, text, tuple(shown), "stop" if self.stopped else reason)

    def _take_echo(self, logprobs: tuple[TokenLogprob, ...]) -> tuple[str, list[TextToken]]:
        """The echoed prompt, once, with its first tokens."""
        text, self._echo = self._echo or "", None
        prompt = OutputText(self._plan.tokenizer)
        shown: list[TextToken] = []
        for entry in logprobs:
            shown += prompt.push(entry.token_id, entry).tokens
        shown += prompt.finish().tokens
        return text, shown

    def _shifted(self, tokens: tuple[TextToken, ...]) -> list[TextToken]:
        if self._start == 0:
            return list(tokens)
        return [TextToken(t.token_id, t.offset + self._start, t.logprob) for t in tokens]


_ChoiceEvent = tuple[_Choice, SequenceEvent]


class GenerationRun:
    """Drives the sequences of one plan. Iterate `deltas` to the end, or close it early."""

    def __init__(self, engine: SequenceEngine, plan: RunPlan) -> None:
        self._engine = engine
        self.plan = plan
        self.totals = RunTotals()

    async def cancel(self) -> None:
        """End every sequence now; choices finish with reason `cancelled`."""
        for request in self.plan.sequences:
            await self._abort(request.sequence_id)

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Text of all choices as it becomes final; each choice ends with a `finish_reason`.

        Raises PlatformError or RoutingError (`refusals`). However it ends, no sequence of the run
        is left in the engine.
        """
        choices = [_Choice(self.plan, index) for index in range(len(self.plan.sequences))]
        running, started = set(choices), time.monotonic()
        try:
            async with contextlib.aclosing(self._events(choices)) as events:
                async for choice, event in events:
                    delta: ChoiceDelta | None
                    if isinstance(event, Finished):
                        running.discard(choice)
                        delta = self._end(choice, event)
                    else:
                        delta = await self._continue(choice, event)
                    if delta is not None:
                        yield delta
        except EngineError as error:
            raise of_engine(error) from error
        finally:
            for choice in running:
                self._abandon(choice, started)

    async def _events(self, choices: list[_Choice]) -> AsyncGenerator[_ChoiceEvent, None]:
        """Events of all choices as they come. Closing it ends what still runs."""
        if len(choices) == 1:
            async with contextlib.aclosing(self._engine.generate(choices[0].request)) as events:
                async for event in events:
                    yield choices[0], event
            return
        # A full queue makes the pumps wait, so a slow reader is seen by the engine's client.
        queue: asyncio.Queue[_ChoiceEvent | Exception] = asyncio.Queue(2 * len(choices))
        pumps = [asyncio.create_task(self._pump(choice, queue)) for choice in choices]
        running = len(choices)
        try:
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                running -= isinstance(item[1], Finished)
                yield item
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, choice: _Choice, queue: "asyncio.Queue[_ChoiceEvent | Exception]"
    ) -> None:
        """Forward one sequence's events; being cancelled closes (and so aborts) the sequence."""
        try:
            async with contextlib.aclosing(self._engine.generate(choice.request)) as events:
                async for event in events:
                    await queue.put((choice, event))
        except EngineError as error:
            await queue.put(error)
        except Exception as error:
            logger.exception("the stream of %s broke", choice.request.sequence_id)
            await queue.put(error)

    async def _continue(self, choice: _Choice, event: Tokens) -> ChoiceDelta | None:
        if choice.stopped:  # on its way out: tokens made before the abort arrived
            return None
        delta = choice.take(event)
        if choice.stopped:
            await self._abort(choice.request.sequence_id)
        return delta

    async def _abort(self, sequence_id: str) -> None:
        """A lost engine has nothing to abort, and its streams say so themselves."""
        with contextlib.suppress(EngineUnavailableError):
            await self._engine.abort(sequence_id)

    def _abandon(self, choice: _Choice, started: float) -> None:
        """Count a choice that the client left, or that another's error ended. started: monotonic;
        the engine tells no times of it, so they are those seen here."""
        self.totals.finished = max(self.totals.finished, time.monotonic() - started)
        if choice.first_seen is not None:
            self.totals.saw_first(choice.first_seen - started)
        if choice.index % self.plan.choices_per_prompt == 0:
            self.totals.prompt_tokens += len(choice.request.prompt)
        self.totals.completion_tokens += choice.tokens_seen
        self.totals.finish_reasons.append("cancelled")

    def _end(self, choice: _Choice, event: Finished) -> ChoiceDelta | None:
        if event.cache is not None:
            self.totals.cache.append((choice.request, event.cache))
        if event.reason in ("error", "deadline"):
            raise of_end(event)
        totals, timings = self.totals, event.timings
        if choice.index % self.plan.choices_per_prompt == 0:
            totals.prompt_tokens += event.prompt_tokens
            totals.cached_tokens += event.cached_tokens
        totals.completion_tokens += (
            choice.tokens_seen if choice.stopped else event.completion_tokens
        )
        totals.accepted_tokens += event.accepted_tokens
        totals.rejected_tokens += event.rejected_tokens
        totals.queue_time = max(totals.queue_time, timings.queued)
        if timings.first_token is not None:
            totals.saw_first(timings.first_token)
        totals.finished = max(totals.finished, timings.finished)
        if choice.stopped:  # its last delta has been given
            totals.finish_reasons.append("stop")
            return None
        last = choice.finish(event)
        totals.finish_reasons.append(last.finish_reason or "stop")
        return last
