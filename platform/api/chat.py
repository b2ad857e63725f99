"""`POST /v1/chat/completions`."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Literal

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
from polyloom.platform.api.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    MessageDelta,
)
from polyloom.platform.api.streaming import EventStream, sse
from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.inference import Inference, InferenceCall, Prompt, Target
from polyloom.platform.generation.logprobs import ChatLogprobs, chat_logprobs
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
from polyloom.platform.generation.run import ChoiceDelta
from polyloom.platform.generation.templates import Message


@post(
    "/v1/chat/completions",
    guards=[requires("inference")],
    status_code=200,
    operation_class=json_body(ChatRequest),
    responses={200: ResponseSpec(ChatCompletion, generate_examples=False)},
)
async def create_chat_completion(
    request: AuthorizedRequest, inference: NamedDependency[Inference]
) -> Response[ChatCompletion] | EventStream:
    """Answer a conversation, at once or as a stream of chunks."""
    body = await read_body(ChatRequest, request)
    refuse_unsupported(body)
    with_usage = wants_usage(body.stream, body.stream_options)
    target = await resolve_target(request, inference, body, "chat.completions")
    grammar = await inference.grammar(target, plan_answer_format(body))
    prompt = replace(await plan_prompt(body, target), grammar=grammar)
    call = inference.call(target, [prompt], plan_choices(body), plan_stops(body))
    if body.stream:
        events = stream_chunks(call, with_usage, bool(body.logprobs))
        limit = inference.deadline + STREAM_GRACE_SECONDS
        return EventStream(events, answer_headers(call), limit)
    answer = await until_disconnect(
        request.receive, asyncio.ensure_future(collect(call, bool(body.logprobs)))
    )
    return Response(answer, headers=answer_headers(call), media_type="application/json")


def refuse_unsupported(body: ChatRequest) -> None:
    """Raises InvalidRequest naming a field whose meaning cannot be honoured."""
    if body.tools:
        raise InvalidRequest("tools are not supported yet", param="tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise InvalidRequest("tools are not supported yet", param="tool_choice")
    if body.modalities not in (None, ["text"]):
        raise InvalidRequest("only text", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("only with logprobs=true", param="top_logprobs")


async def plan_prompt(body: ChatRequest, target: Target) -> Prompt:
    """Render and encode the messages; check the parameters against the model."""
    messages = [message_of(m, f"messages[{i}]") for i, m in enumerate(body.messages)]
    if not messages:
        raise InvalidRequest("needs at least one message", param="messages")
    tokenizer = target.format.tokenizer
    ids = await tokenizer.encode(
        await target.format.render(messages, target.tenant.slug),
        special_tokens=False,
        max_tokens=target.served.prompt,
        param="messages",
    )
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = check_top_logprobs("top_logprobs", body.top_logprobs or 0)
    sampling = plan_sampling(
        body,
        tokenizer,
        target.served,
        seed=plan_seed(body),
        max_tokens=plan_max_tokens(asked, None, len(ids), target.served, "messages"),
        logprobs=LogprobsPlan(output=logprobs if body.logprobs else None),
    )
    return Prompt(tuple(ids), sampling)


def message_of(message: ChatMessage, param: str) -> Message:
    """A message as templates expect it: one text. Raises InvalidRequest for anything but text."""
    if message.tool_calls:
        raise InvalidRequest("tools are not supported yet", param=f"{param}.tool_calls")
    content = message.content
    if isinstance(content, list):
        for index, part in enumerate(content):
            if part.type != "text" or part.text is None:
                where = f"{param}.content[{index}]"
                raise InvalidRequest(f"{part.type!r} is not supported, only text", param=where)
        content = "\n".join(part.text or "" for part in content)
    role = "system" if message.role == "developer" else message.role
    out: Message = {"role": role, "content": content or ""}
    if message.name is not None:
        out["name"] = message.name
    return out


async def collect(call: InferenceCall, with_logprobs: bool) -> ChatCompletion:
    """Run to the end and put the choices together."""
    count = len(call.plan.sequences)
    texts, reasons = [""] * count, ["stop"] * count
    pieces: list[list[TextToken]] = [[] for _ in range(count)]
    async with contextlib.aclosing(call.deltas()) as deltas:
        async for delta in deltas:
            texts[delta.index] += delta.text
            pieces[delta.index] += delta.tokens
            reasons[delta.index] = delta.finish_reason or reasons[delta.index]
    choices = [
        ChatChoice(
            index,
            AssistantMessage(texts[index]),
            _logprobs(call, pieces[index], with_logprobs),
            reasons[index],
        )
        for index in range(count)
    ]
    return ChatCompletion(
        id=completion_id(call),
        created=call.created,
        model=call.target.model,
        system_fingerprint=call.target.resolution.combination.fingerprint,
        choices=choices,
        usage=usage_of(call),
    )


async def stream_chunks(
    call: InferenceCall, with_usage: bool, with_logprobs: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as events; each choice's first carries the role."""
    begun: set[int] = set()
    async with contextlib.aclosing(call.deltas()) as deltas:
        async for delta in deltas:
            role: Literal["assistant"] | None = None if delta.index in begun else "assistant"
            begun.add(delta.index)
            yield sse(chunk(call, [_piece(call, delta, role, with_logprobs)]))
    if with_usage:
        yield sse(msgspec.structs.replace(chunk(call, []), usage=usage_of(call)))


def _piece(
    call: InferenceCall, delta: ChoiceDelta, role: Literal["assistant"] | None, with_logprobs: bool
) -> ChunkChoice:
    return ChunkChoice(
        delta.index,
        MessageDelta(role, delta.text if delta.text or role else None),
        _logprobs(call, delta.tokens, with_logprobs),
        delta.finish_reason,
    )


def chunk(call: InferenceCall, choices: list[ChunkChoice]) -> ChatChunk:
    """One event of the stream."""
    return ChatChunk(
        id=completion_id(call),
        created=call.created,
        model=call.target.model,
        system_fingerprint=call.target.resolution.combination.fingerprint,
        choices=choices,
    )


def completion_id(call: InferenceCall) -> str:
    """The answer's id, made of the request's."""
    return "chatcmpl-" + call.target.request_id.removeprefix("req_")


def _logprobs(
    call: InferenceCall, tokens: Sequence[TextToken], wanted: bool
) -> ChatLogprobs | None:
    return chat_logprobs(call.plan.tokenizer, tokens) if wanted else None
