"""Golden prompts: what a candidate must answer before it is put into service."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import Sequence

import msgspec
import regex

from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.inference import Inference, Prompt, Target
from polyloom.platform.generation.request_plan import (
    LogprobsPlan,
    SamplingOptions,
    plan_max_tokens,
    plan_sampling,
)
from polyloom.platform.generation.templates import Message
from polyloom.platform.services.views import TenantView
from polyloom.routing.resolver import Resolution

MAX_PROMPTS = 32
MAX_CHARACTERS = 20_000
MAX_TOKENS = 1_024
MAX_PATTERN_CHARACTERS = 256
MATCH_SECONDS = 0.5
"""A pattern may need exponential time; one that takes longer does not match."""
SHOWN_CHARACTERS = 300


class Expectation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer must be; all that is given must hold.

    contains: a text within it.  equals: the whole answer, spaces around it aside.  matches: a
    regular expression found in it.  json: it parses as JSON.  ends_within: it ends by itself within
    so many tokens.
    """

    contains: str | None = None
    equals: str | None = None
    matches: str | None = None
    json: bool = False
    ends_within: int | None = None


class GoldenMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A message of a golden conversation."""

    role: str
    content: str


class GoldenPrompt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prompt, a text or a conversation, answered greedily with at most `max_tokens`."""

    name: str
    prompt: str | None = None
    messages: tuple[GoldenMessage, ...] | None = None
    max_tokens: int = 64
    expect: Expectation


class GoldenResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a candidate answered. `expected`: the expectation that did not hold, None if all did."""

    name: str
    expected: str | None
    got: str

    @property
    def passed(self) -> bool:
        return self.expected is None


def check_prompts(prompts: Sequence[GoldenPrompt]) -> None:
    """Raises InvalidRequest naming the field of a prompt that cannot be run."""
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest(f"a gate has at most {MAX_PROMPTS} prompts", param="prompts")
    if len({prompt.name for prompt in prompts}) < len(prompts):
        raise InvalidRequest("two prompts have the same name", param="prompts")
    for index, prompt in enumerate(prompts):
        _check_prompt(prompt, f"prompts[{index}]")


def _check_prompt(prompt: GoldenPrompt, at: str) -> None:
    texts = [m.content for m in prompt.messages or ()] + [prompt.prompt or ""]
    if (prompt.prompt is None) == (prompt.messages is None) or not any(texts):
        raise InvalidRequest("needs either a prompt or messages", param=at)
    if not 0 < len(prompt.name) <= 128 or "\0" in prompt.name:
        raise InvalidRequest("a prompt's name has 1 to 128 characters", param=f"{at}.name")
    if sum(map(len, texts)) > MAX_CHARACTERS:
        raise InvalidRequest(f"has more than {MAX_CHARACTERS} characters", param=at)
    if not 0 < prompt.max_tokens <= MAX_TOKENS:
        raise InvalidRequest(f"is not between 1 and {MAX_TOKENS}", param=f"{at}.max_tokens")
    _check_expectation(prompt, f"{at}.expect")


def _check_expectation(prompt: GoldenPrompt, at: str) -> None:
    expect = prompt.expect
    if expect == Expectation():
        raise InvalidRequest("expects nothing", param=at)
    if expect.ends_within is not None and not 0 < expect.ends_within <= prompt.max_tokens:
        raise InvalidRequest("is not between 1 and max_tokens", param=f"{at}.ends_within")
    if any(len(t or "") > MAX_CHARACTERS for t in (expect.contains, expect.equals)):
        raise InvalidRequest(f"has more than {MAX_CHARACTERS} characters", param=at)
    if expect.matches is not None:
        if len(expect.matches) > MAX_PATTERN_CHARACTERS:
            raise InvalidRequest(
                f"has more than {MAX_PATTERN_CHARACTERS} characters", param=f"{at}.matches"
            )
        try:
            regex.compile(expect.matches)
        except (regex.error, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequest(f"no regular expression: {error}", param=f"{at}.matches") from None


def broken_expectation(expect: Expectation, text: str, tokens: int, reason: str) -> str | None:
    """The first expectation that an answer does not meet, in words. tokens: of the answer, its end
    included.  reason: why it ended."""
    if expect.contains is not None and expect.contains not in text:
        return f"contains {expect.contains!r}"
    if expect.equals is not None and expect.equals.strip() != text.strip():
        return f"equals {expect.equals!r}"
    if expect.matches is not None and not _found(expect.matches, text):
        return f"matches {expect.matches!r}"
    if expect.json and not _is_json(text):
        return "is JSON"
    if expect.ends_within is not None and (reason != "stop" or tokens > expect.ends_within):
        return f"ends within {expect.ends_within} tokens"
    return None


def _found(pattern: str, text: str) -> bool:
    try:
        found = regex.search(pattern, text, timeout=MATCH_SECONDS, concurrent=True)
    except TimeoutError:
        return False
    return found is not None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


class GoldenRuns:
    """Has candidates answer golden prompts, as requests of their tenant like any other."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def __call__(
        self, tenant: TenantView, candidate: Resolution, prompts: Sequence[GoldenPrompt]
    ) -> tuple[GoldenResult, ...]:
        """One after the other, up to the first that is not answered as expected. Raises
        EngineUnavailable, RateLimited and what else a request can meet."""
        results: list[GoldenResult] = []
        for prompt in prompts:
            results.append(await self._run(tenant, candidate, prompt))
            if not results[-1].passed:
                break
        return tuple(results)

    async def _run(
        self, tenant: TenantView, candidate: Resolution, prompt: GoldenPrompt
    ) -> GoldenResult:
        target = await self._inference.target_of(
            candidate,
            tenant,
            None,
            candidate.label,
            "gate",
            request_id="req_" + uuid.uuid4().hex,
        )
        ids = await _encode(target, prompt)
        call = self._inference.call(target, [_planned(target, prompt, ids)], 1, ())
        text, reason = "", "stop"
        async with contextlib.aclosing(call.deltas()) as deltas:
            async for delta in deltas:
                text += delta.text
                reason = delta.finish_reason or reason
        expected = await asyncio.to_thread(
            broken_expectation, prompt.expect, text, call.run.totals.completion_tokens, reason
        )
        return GoldenResult(name=prompt.name, expected=expected, got=text[:SHOWN_CHARACTERS])


async def _encode(target: Target, prompt: GoldenPrompt) -> tuple[int, ...]:
    text, has_special_tokens = prompt.prompt, True
    if text is None:
        messages: list[Message] = [
            {"role": m.role, "content": m.content} for m in prompt.messages or ()
        ]
        text = await target.format.render(messages, target.tenant.slug)
        has_special_tokens = False
    ids = await target.format.tokenizer.encode(
        text,
        special_tokens=has_special_tokens,
        max_tokens=target.served.prompt,
        param=prompt.name,
    )
    return tuple(ids)


def _planned(target: Target, prompt: GoldenPrompt, ids: tuple[int, ...]) -> Prompt:
    return Prompt(
        ids,
        plan_sampling(
            SamplingOptions(model=target.model, temperature=0.0),
            target.format.tokenizer,
            target.served,
            seed=0,
            max_tokens=plan_max_tokens(
                prompt.max_tokens, None, len(ids), target.served, prompt.name
            ),
            logprobs=LogprobsPlan(),
        ),
    )
