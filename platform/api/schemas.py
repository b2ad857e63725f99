"""OpenAI's bodies, requests and answers. Unknown fields of a request are refused by name."""

from typing import Any, Literal

import msgspec

from polyloom.platform.generation.logprobs import ChatLogprobs, CompletionLogprobs
from polyloom.platform.generation.request_plan import SamplingOptions
from polyloom.platform.generation.tools.requests import Tool, ToolCall, ToolChoice


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """include_usage: a last chunk with the usage of the whole request."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class CompletionRequest(SamplingOptions, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/completions`; `prompt` is text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a message's content; only text is understood."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message. `developer` is OpenAI's newer word for `system`. tool_calls: of an answer that
    the client sends back; tool_call_id: the call that a `tool` message is the result of. The last
    fields are empty in answers."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None


class ChatRequest(SamplingOptions, kw_only=True, forbid_unknown_fields=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """cached_tokens: prompt tokens whose KV was reused."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Drafted tokens that came out, and those that did not and are no part of the answer."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of the whole request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class CompletionChoice(msgspec.Struct, frozen=True):
    """A choice, or in a stream a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class AssistantMessage(msgspec.Struct, frozen=True):
    """The whole answer of one choice. content: null where it is calls alone."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One choice of a chat answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of chat completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """News of a call's function: its name once, then its arguments in parts."""

    arguments: str
    name: str | None = None


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """News of a call; the first carries its id and type."""

    index: int
    function: FunctionDelta
    id: str | None = None
    type: Literal["function"] | None = None


class MessageDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """News of a message; the first of a choice carries the role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one choice."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of `/v1/models`. root: the base; parent: the base of an adapter, else null."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    root: str
    parent: str | None


class ModelList(msgspec.Struct, frozen=True):
    """Answer of `/v1/models`: the base first, then the tenant's own."""

    data: list[Model]
    object: Literal["list"] = "list"


class ErrorBody(msgspec.Struct, frozen=True):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Body of every error."""

    error: ErrorBody
