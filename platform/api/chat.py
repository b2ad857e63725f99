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
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    MessageDelta,
)
from polyloom.platform.api.streaming import EventStream, sse
from polyloom.platform.api.tool_calls import MessagePart, MessageReader, WholeMessage, tool_fields
from polyloom.platform.errors import ContextLengthExceeded, InvalidRequest
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
from polyloom.platform.generation.templates import Message
from polyloom.platform.generation.tools.formats import ToolFormat
from polyloom.platform.generation.tools.grammars import argument_schemas, tool_grammar
from polyloom.platform.generation.tools.messages import render_prompt
from polyloom.platform.generation.tools.requests import ToolUse, tool_use


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
    call, form = await plan_call(body, target, inference)
    if body.stream:
        events = stream_chunks(call, form, with_usage, bool(body.logprobs))
        limit = inference.deadline + STREAM_GRACE_SECONDS
        return EventStream(events, answer_headers(call), limit)
    answer = await until_disconnect(
        request.receive, asyncio.ensure_future(collect(call, form, bool(body.logprobs)))
    )
    return Response(answer, headers=answer_headers(call), media_type="application/json")


def refuse_unsupported(body: ChatRequest) -> None:
    """Raises InvalidRequest naming a field whose meaning cannot be honoured."""
    if body.modalities not in (None, ["text"]):
        raise InvalidRequest("only text", param="modalities")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("only with logprobs=true", param="top_logprobs")


async def plan_call(
    body: ChatRequest, target: Target, inference: Inference
) -> tuple[InferenceCall, ToolFormat | None]:
    """The call, and how the model writes tool calls if it may make any."""
    use, tokenizer = _tool_use(body), target.format.tokenizer
    asked, parts, form = plan_answer_format(body), (), None
    shown = frozenset[int]()
    if use is not None:
        form = target.format.tool_format
        shown = form.special_ids(tokenizer)
        parts = (*argument_schemas(use), *(() if asked is None else (asked,)))
        asked = tool_grammar(use, form, tokenizer, asked)
        if asked is not None and body.min_tokens:
            raise InvalidRequest("cannot be combined with these tools", param="min_tokens")
    grammar = await inference.grammar(target, asked, parts)
    prompt = replace(await plan_prompt(body, target), grammar=grammar)
    call = inference.call(target, [prompt], plan_choices(body), plan_stops(body), shown=shown)
    return call, form


def _tool_use(body: ChatRequest) -> ToolUse | None:
    return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)


async def plan_prompt(body: ChatRequest, target: Target) -> Prompt:
    """Render and encode the messages; check the parameters against the model."""
    count, longest = len(body.messages), target.served.prompt
    if not count:
        raise InvalidRequest("needs at least one message", param="messages")
    if count > longest:  # each takes a token at the least
        raise ContextLengthExceeded(
            f"{count} messages cannot fit {longest} tokens", param="messages"
        )
    messages = [message_of(m, f"messages[{i}]") for i, m in enumerate(body.messages)]
    tokenizer, use = target.format.tokenizer, _tool_use(body)
    ids = await tokenizer.encode(
        await render_prompt(target.format, messages, use, target.tenant.slug),
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
    return Prompt(tuple(ids), sampling, tool_schema_digest=None if use is None else use.digest)


def message_of(message: ChatMessage, param: str) -> Message:
    """A message as templates expect it: one text, and calls or whose result it is. Raises
    InvalidRequest for anything else."""
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
    return out | tool_fields(message, param)


async def collect(
    call: InferenceCall, form: ToolFormat | None, with_logprobs: bool
) -> ChatCompletion:
    """Run to the end and put the choices together."""
    readers = [MessageReader(form) for _ in call.plan.sequences]
    wholes = [WholeMessage() for _ in readers]
    pieces: list[list[TextToken]] = [[] for _ in readers]
    async with contextlib.aclosing(call.deltas()) as deltas:
        async for delta in deltas:
            wholes[delta.index].add(readers[delta.index].read(delta))
            pieces[delta.index] += delta.tokens
    choices = [
        ChatChoice(
            index,
            whole.message,
            _logprobs(call, pieces[index], with_logprobs),
            whole.finish_reason,
        )
        for index, whole in enumerate(wholes)
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
    call: InferenceCall, form: ToolFormat | None, with_usage: bool, with_logprobs: bool
) -> AsyncGenerator[bytes, None]:
    """The answer as events; each choice's first carries the role."""
    begun: set[int] = set()
    readers = [MessageReader(form) for _ in call.plan.sequences]
    async with contextlib.aclosing(call.deltas()) as deltas:
        async for delta in deltas:
            part = readers[delta.index].read(delta)
            if part.empty and not (with_logprobs and delta.tokens):
                continue  # what may become a call is held back
            role: Literal["assistant"] | None = None if delta.index in begun else "assistant"
            begun.add(delta.index)
            logprobs = _logprobs(call, delta.tokens, with_logprobs)
            yield sse(chunk(call, [_piece(delta.index, part, role, logprobs)]))
    if with_usage:
        yield sse(msgspec.structs.replace(chunk(call, []), usage=usage_of(call)))


def _piece(
    index: int, part: MessagePart, role: Literal["assistant"] | None, logprobs: ChatLogprobs | None
) -> ChunkChoice:
    content = part.content if part.content or (role and not part.calls) else None
    delta = MessageDelta(role, content, list(part.calls) or None)
    return ChunkChoice(index, delta, logprobs, part.finish_reason)


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
