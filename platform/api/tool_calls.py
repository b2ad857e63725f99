"""Messages with tools on their way in, and tool calls on their way out."""

import secrets
from dataclasses import dataclass

import msgspec

from polyloom.platform.api.schemas import (
    AssistantMessage,
    ChatMessage,
    FunctionDelta,
    ToolCallDelta,
)
from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.nesting import nested_too_deeply
from polyloom.platform.generation.run import ChoiceDelta
from polyloom.platform.generation.templates import Message
from polyloom.platform.generation.tools.formats import ToolFormat
from polyloom.platform.generation.tools.parser import (
    ArgumentsPiece,
    CallBegun,
    TextPiece,
    ToolCallParser,
)
from polyloom.platform.generation.tools.requests import FunctionCall, ToolCall


def tool_fields(message: ChatMessage, param: str) -> Message:
    """What a message has of tools, as templates expect it: arguments are objects.

    Raises InvalidRequest for fields that do not go with its role, and for arguments that are none.
    """
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest("only in messages of the assistant", param=f"{param}.tool_calls")
    if (message.tool_call_id is None) == (message.role == "tool"):
        where = f"{param}.tool_call_id"
        raise InvalidRequest("goes with the role tool, and only with it", param=where)
    fields: Message = {}
    if message.tool_calls:
        fields["tool_calls"] = [
            _call_for_templates(call, f"{param}.tool_calls[{index}]")
            for index, call in enumerate(message.tool_calls)
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def _call_for_templates(call: ToolCall, param: str) -> Message:
    where = f"{param}.function.arguments"
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict)
    except msgspec.DecodeError:
        raise InvalidRequest("is no JSON object", param=where) from None
    except RecursionError:
        raise InvalidRequest("is nested too deeply", param=where) from None
    if nested_too_deeply(arguments):
        raise InvalidRequest("is nested too deeply", param=where)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


@dataclass(frozen=True)
class MessagePart:
    """What a delta of the engine's text adds to a message."""

    content: str
    calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str | None = None

    @property
    def empty(self) -> bool:
        """Nothing to tell a client."""
        return not (self.content or self.calls or self.finish_reason)


class MessageReader:
    """Makes the message of one choice out of its text."""

    def __init__(self, form: ToolFormat | None) -> None:
        """form: how calls are written; None: all is text."""
        self._form = form
        self._parser = None if form is None else ToolCallParser(form)

    def read(self, delta: ChoiceDelta) -> MessagePart:
        """An answer that made calls and ended by itself has the finish reason `tool_calls`."""
        parser, form = self._parser, self._form
        if parser is None or form is None:
            return MessagePart(delta.text, finish_reason=delta.finish_reason)
        events = parser.push(delta.text)
        reason = delta.finish_reason
        if reason is not None:
            events += parser.finish()
            reason = "tool_calls" if reason == "stop" and parser.calls else reason
        content, calls = "", dict[int, ToolCallDelta]()
        for event in events:
            match event:
                case TextPiece(text):
                    content += text
                case CallBegun(index, name):
                    function = FunctionDelta("", name)
                    calls[index] = ToolCallDelta(index, function, _new_id(form), "function")
                case ArgumentsPiece(index, text):
                    before = calls.get(index, ToolCallDelta(index, FunctionDelta("")))
                    function = FunctionDelta(before.function.arguments + text, before.function.name)
                    calls[index] = msgspec.structs.replace(before, function=function)
        return MessagePart(content, tuple(calls.values()), reason)


class WholeMessage:
    """The message of one choice, put together from its parts."""

    def __init__(self) -> None:
        self.finish_reason = "stop"
        self._content = ""
        self._calls: list[ToolCall] = []

    def add(self, part: MessagePart) -> None:
        """The next part."""
        self._content += part.content
        self.finish_reason = part.finish_reason or self.finish_reason
        for news in part.calls:
            if news.id is not None and news.function.name is not None:
                function = FunctionCall(name=news.function.name, arguments="")
                self._calls.append(ToolCall(id=news.id, function=function))
            call = self._calls[news.index]
            arguments = call.function.arguments + news.function.arguments
            function = msgspec.structs.replace(call.function, arguments=arguments)
            self._calls[news.index] = msgspec.structs.replace(call, function=function)

    @property
    def message(self) -> AssistantMessage:
        if not self._calls:
            return AssistantMessage(self._content)
        return AssistantMessage(self._content or None, tool_calls=self._calls)


def _new_id(form: ToolFormat) -> str:
    return secrets.token_hex(5)[:9] if form.short_ids else "call_" + secrets.token_hex(12)
