"""`POST /v1/completions`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence

import msgspec
from litestar import Response, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec

from polyloom.platform.api.answers import (
    STREAM_GRACE_SECONDS,
    answer_headers,
    resolve_target,
    usage_of,
    wants_usage,
)
from polyloom.platform.api.bodies import read_body
from polyloom.platform.api.disconnect import until_disconnect
from polyloom.platform.api.guards import AuthorizedRequest, requires
from polyloom.platform.api.openapi import json_body
from polyloom.platform.api.schemas import Completion, CompletionChoice, CompletionRequest
from polyloom.platform.api.streaming import EventStream, sse
from polyloom.platform.errors import ContextLengthExceeded, InvalidRequest
from polyloom.platform.generation.detokenize import decode
from polyloom.platform.generation.inference import Inference, InferenceCall, Prompt, Target
from polyloom.platform.generation.logprobs import CompletionLogprobs, completion_logprobs
from polyloom.platform.generation.output_text import TextToken
from polyloom.platform.generation.request_plan import (
    LogprobsPlan,
    check_top_logprobs,
    plan_answer_format,
    plan_choices,
    plan_max_tokens,
    plan_sampling,
    plan_seed,
    plan_stops,
)
from polyloom.routing.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 128


@post(
    "/v1/completions",
    guards=[requires("inference")],
    status_code=200,
    operation_class=json_body(CompletionRequest),
    responses={200: ResponseSpec(Completion, generate_examples=False)},
)
async def create_completion(
    request: AuthorizedRequest, inference: NamedDependency[Inference]
) -> Response[Completion] | EventStream:
    """Continue one or many prompts, at once or as a stream of pieces."""
    body = await read_body(CompletionRequest, request)
    refuse_unsupported(body)
    with_usage = wants_usage(body.stream, body.stream_options)
    target = await resolve_target(request, inference, body, "completions")
    call = await plan_call(body, target, inference)
    if body.stream:
        events = stream_pieces(call, with_usage, body.logprobs is not None)
        limit = inference.deadline + STREAM_GRACE_SECONDS
        return EventStream(events, answer_headers(call), limit)
    answer = await until_disconnect(
        request.receive, asyncio.ensure_future(collect(call, body.logprobs is not None))
    )
    return Response(answer, headers=answer_headers(call), media_type="application/json")


def refuse_unsupported(body: CompletionRequest) -> None:
    """Raises InvalidRequest naming a field whose meaning cannot be honoured."""
    if body.suffix:
        raise InvalidRequest("infilling is not supported", param="suffix")
    if body.best_of not in (None, body.n or 1):
        raise InvalidRequest("only best_of equal to n is supported", param="best_of")


async def plan_call(body: CompletionRequest, target: Target, inference: Inference) -> InferenceCall:
    """Encode the prompts and check the parameters against the model."""
    texts_or_ids = prompts_of(body)
    choices = plan_choices(body, len(texts_or_ids))
    grammar = await inference.grammar(target, plan_answer_format(body))
    prompts: list[Prompt] = []
    for prompt in texts_or_ids:
        ids = await _encode(prompt, target)
        prompts.append(Prompt(ids, _sampling(body, target, ids), grammar))
    echo: tuple[str, ...] = ()
    if body.echo:
        tokenizer = target.format.tokenizer
        echo = tuple(p if isinstance(p, str) else decode(tokenizer, p) for p in texts_or_ids)
    prompt_only = bool(body.echo) and body.max_tokens == 0
    return inference.call(target, prompts, choices, plan_stops(body), echo, prompt_only)


async def first_prompt(body: CompletionRequest, target: Target) -> Prompt:
    """Encode the first prompt alone, and check the parameters against the model."""
    ids = await _encode(prompts_of(body)[0], target)
    return Prompt(ids, _sampling(body, target, ids))


def prompts_of(body: CompletionRequest) -> list[str] | list[list[int]]:
    """`prompt` as a list of prompts. Raises InvalidRequest when there are none, too many, or a
    mixture."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    ids = [p for p in prompt if isinstance(p, int)]
    if ids and len(ids) == len(prompt):
        return [ids]
    if not 0 < len(prompt) <= MAX_PROMPTS:
        raise InvalidRequest(f"needs 1 to {MAX_PROMPTS} prompts", param="prompt")
    texts = [p for p in prompt if isinstance(p, str)]
    if len(texts) == len(prompt):
        return texts
    lists = [p for p in prompt if isinstance(p, list)]
    if len(lists) == len(prompt):
        return lists
    raise InvalidRequest("is a mixture of texts and token ids", param="prompt")


async def _encode(prompt: str | list[int], target: Target) -> tuple[int, ...]:
    tokenizer = target.format.tokenizer
    if isinstance(prompt, str):
        ids = await tokenizer.encode(
            prompt, special_tokens=True, max_tokens=target.served.prompt, param="prompt"
        )
        if not ids and tokenizer.bos_id is not None:
            ids = [tokenizer.bos_id]
    else:
        ids = prompt
        if len(ids) > target.served.prompt:
            raise ContextLengthExceeded(
                f"a prompt of {len(ids)} tokens cannot fit {target.served.prompt}", param="prompt"
            )
        if any(not 0 <= i < tokenizer.vocabulary_size for i in ids):
            raise InvalidRequest("holds ids outside the vocabulary", param="prompt")
    if not ids:
        raise InvalidRequest("is empty", param="prompt")
    return tuple(ids)


def _sampling(body: CompletionRequest, target: Target, ids: tuple[int, ...]) -> SamplingParams:
    asked = 1 if body.echo and body.max_tokens == 0 else body.max_tokens
    top = None if body.logprobs is None else check_top_logprobs("logprobs", body.logprobs)
    return plan_sampling(
        body,
        target.format.tokenizer,
        target.served,
        seed=plan_seed(body),
        max_tokens=plan_max_tokens(asked, DEFAULT_MAX_TOKENS, len(ids), target.served, "prompt"),
        logprobs=LogprobsPlan(output=top, prompt=top if body.echo else None),
    )


async def collect(call: InferenceCall, with_logprobs: bool) -> Completion:
    """Run to the end and put the choices together."""
    count = len(call.plan.sequences)
    texts, reasons = [""] * count, ["stop"] * count
    tokens: list[list[TextToken]] = [[] for _ in range(count)]
    async with contextlib.aclosing(call.deltas()) as deltas:
        async for delta in deltas:
            texts[delta.index] += delta.text
            tokens[delta.index] += delta.tokens
            reasons[delta.index] = delta.finish_reason or reasons[delta.index]
    choices = [
        CompletionChoice(i, texts[i], _logprobs(call, tokens[i], with_logprobs), reasons[i])
        for i in range(count)
    ]
    return msgspec.structs.replace(answer(call, choices), usage=usage_of(call))


async def stream_pieces(
    call: InferenceCall, with_usage: bool, with_logprobs: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as events."""
    async with contextlib.aclosing(call.deltas()) as deltas:
        async for delta in deltas:
            logprobs = _logprobs(call, delta.tokens, with_logprobs)
            choice = CompletionChoice(delta.index, delta.text, logprobs, delta.finish_reason)
            yield sse(answer(call, [choice]))
    if with_usage:
        yield sse(msgspec.structs.replace(answer(call, []), usage=usage_of(call)))


def answer(call: InferenceCall, choices: list[CompletionChoice]) -> Completion:
    """The answer, or an event of its stream, without usage."""
    return Completion(
        id="cmpl-" + call.target.request_id.removeprefix("req_"),
        created=call.created,
        model=call.target.model,
        system_fingerprint=call.target.resolution.combination.fingerprint,
        choices=choices,
    )


def _logprobs(
    call: InferenceCall, tokens: Sequence[TextToken], wanted: bool
) -> CompletionLogprobs | None:
    return completion_logprobs(call.plan.tokenizer, tokens) if wanted else None
