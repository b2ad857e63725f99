"""A run merges its sequences, cuts at stop strings, counts, and leaves nothing in the engine."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import islice

import pytest

from polyloom.platform.engine.errors import EngineRefusedError, EngineUnavailableError
from polyloom.platform.engine.messages import Finished, FinishReason, Timings, TokenLogprob, Tokens
from polyloom.platform.errors import DeadlineExceeded, EngineUnavailable, QueueFull
from polyloom.platform.generation.run import ChoiceDelta, GenerationRun, RunPlan
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.routing.combination import Combination
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams

PROMPT = (5, 6, 7)


def batched(tokens: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    rest = iter(tokens)
    while block := tuple(islice(rest, size)):
        yield block


class ScriptedEngine:
    """Gives each sequence its script, token by token; an abort ends it as the engine would."""

    def __init__(
        self, scripts: dict[str, Sequence[int]], end: FinishReason = "length", block: int = 1
    ) -> None:
        """block: tokens that come at once, as accepted drafts do."""
        self.scripts = scripts
        self.block = block
        self.end = end
        self.error: Exception | None = None
        self.aborted: list[str] = []
        self.open: set[str] = set()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Tokens | Finished, None]:
        name = request.sequence_id
        self.open.add(name)
        sent = 0
        try:
            for block in batched(self.scripts[name], self.block):
                await asyncio.sleep(0)
                if name in self.aborted:
                    break
                sent += len(block)
                yield Tokens(name, block, tuple(TokenLogprob(token, -1.0) for token in block))
            if self.error is not None:
                raise self.error
            reason = "abort" if name in self.aborted else self.end
            timings = Timings(queued=0.1, first_token=0.2, finished=0.5)
            yield Finished(name, reason, len(request.prompt), sent, timings)
        finally:
            self.open.discard(name)

    async def abort(self, sequence_id: str) -> None:
        self.aborted.append(sequence_id)


def plan_of(
    tokenizer: TextTokenizer, count: int = 1, stops: tuple[str, ...] = (), **more: object
) -> RunPlan:
    sequences = tuple(
        GenerationRequest(
            sequence_id=str(index),
            tenant="t",
            combination=Combination("b", "t"),
            adapter=None,
            prompt=PROMPT,
            sampling=SamplingParams(max_tokens=50, seed=0, choice=index),
        )
        for index in range(count)
    )
    return RunPlan(sequences, tokenizer, stops, count, **more)  # type: ignore[arg-type]


def ids_of(tokenizer: TextTokenizer, text: str) -> list[int]:
    return [i for c in text for i in tokenizer.encode_now(c, special_tokens=False)]


async def collect(run: GenerationRun) -> list[ChoiceDelta]:
    return [delta async for delta in run.deltas()]


async def test_choices_are_merged_and_counted(byte_level: TextTokenizer) -> None:
    scripts = {"0": ids_of(byte_level, "one"), "1": ids_of(byte_level, "second")}
    run = GenerationRun(ScriptedEngine(scripts), plan_of(byte_level, 2))
    texts, reasons = {0: "", 1: ""}, {}
    for delta in await collect(run):
        texts[delta.index] += delta.text
        if delta.finish_reason:
            reasons[delta.index] = delta.finish_reason
    assert texts == {0: "one", 1: "second"}
    assert reasons == {0: "length", 1: "length"}
    assert (run.totals.prompt_tokens, run.totals.completion_tokens) == (3, 9)


async def test_a_stop_string_aborts_and_counts_what_was_used(byte_level: TextTokenizer) -> None:
    engine = ScriptedEngine({"0": ids_of(byte_level, "abXYcdefgh")})
    run = GenerationRun(engine, plan_of(byte_level, stops=("XY",)))
    deltas = await collect(run)
    assert "".join(d.text for d in deltas) == "ab"
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop"]
    assert engine.aborted == ["0"]
    assert run.totals.completion_tokens == 4


@pytest.mark.parametrize("block", range(1, 9))
async def test_a_stop_string_cuts_blocks_of_accepted_tokens_like_single_ones(
    byte_level: TextTokenizer, block: int
) -> None:
    """Across a block's edge, inside one, split over two tokens: text, ids, logprobs and usage."""
    engine = ScriptedEngine({"0": ids_of(byte_level, "abcdXYZefghijkl")}, block=block)
    run = GenerationRun(engine, plan_of(byte_level, stops=("XYZ",)))
    deltas = await collect(run)
    assert "".join(d.text for d in deltas) == "abcd"
    tokens = [token for delta in deltas for token in delta.tokens]
    assert [token.token_id for token in tokens] == ids_of(byte_level, "abcd")
    assert all(token.logprob is not None for token in tokens)
    assert run.totals.completion_tokens == 7


async def test_leaving_early_closes_every_sequence(byte_level: TextTokenizer) -> None:
    engine = ScriptedEngine({"0": ids_of(byte_level, "a" * 40), "1": ids_of(byte_level, "b" * 40)})
    run = GenerationRun(engine, plan_of(byte_level, 2))
    async with aclosing(run.deltas()) as deltas:
        async for _ in deltas:
            break
    assert engine.open == set()
    assert run.totals.finish_reasons == ["cancelled", "cancelled"]
    assert run.totals.prompt_tokens == 3
    assert run.totals.completion_tokens >= 1
    assert run.totals.first_token is not None
    assert 0 < run.totals.first_token <= run.totals.finished


async def test_cancelling_ends_with_its_own_reason(byte_level: TextTokenizer) -> None:
    engine = ScriptedEngine({"0": ids_of(byte_level, "a" * 40)})
    run = GenerationRun(engine, plan_of(byte_level))
    deltas = []
    async for delta in run.deltas():
        deltas.append(delta)
        await run.cancel()
    assert deltas[-1].finish_reason == "cancelled"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (EngineRefusedError("queue_full", "full", 3.0), QueueFull),
        (EngineUnavailableError("lost"), EngineUnavailable),
    ],
)
async def test_an_error_of_one_choice_ends_all(
    byte_level: TextTokenizer, error: Exception, expected: type[Exception]
) -> None:
    engine = ScriptedEngine({"0": ids_of(byte_level, "a"), "1": ids_of(byte_level, "b" * 40)})
    engine.error = error
    run = GenerationRun(engine, plan_of(byte_level, 2))
    with pytest.raises(expected) as raised:
        await collect(run)
    assert raised.value.retry_after == error.retry_after  # type: ignore[attr-defined]
    assert engine.open == set()


async def test_a_deadline_is_an_error(byte_level: TextTokenizer) -> None:
    engine = ScriptedEngine({"0": ids_of(byte_level, "abc")}, end="deadline")
    with pytest.raises(DeadlineExceeded):
        await collect(GenerationRun(engine, plan_of(byte_level)))


async def test_an_echo_comes_first_and_shifts_offsets(byte_level: TextTokenizer) -> None:
    engine = ScriptedEngine({"0": ids_of(byte_level, "xy")})
    deltas = await collect(GenerationRun(engine, plan_of(byte_level, echo=("prompt: ",))))
    assert "".join(d.text for d in deltas) == "prompt: xy"
    assert [t.offset for d in deltas for t in d.tokens] == [8, 9]


async def test_only_the_echo_when_nothing_else_was_asked(byte_level: TextTokenizer) -> None:
    engine = ScriptedEngine({"0": ids_of(byte_level, "x")})
    plan = plan_of(byte_level, echo=("prompt",), prompt_only=True)
    deltas = await collect(GenerationRun(engine, plan))
    assert "".join(d.text for d in deltas) == "prompt"
