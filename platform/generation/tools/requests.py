"""Tools of a chat request, as OpenAI writes them, and what is to be done with them."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.nesting import nested_too_deeply

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


class Function(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A function that the model may call. strict: its arguments are held to `parameters`."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Only functions are tools here."""

    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which function to call."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A `tool_choice` that names one function."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(msgspec.Struct, kw_only=True, frozen=True):
    """arguments: a JSON object as text, as the model wrote it."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True, frozen=True):
    """A call in an answer, and in the history that clients send back."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


@dataclass(frozen=True)
class ToolUse:
    """The tools that an answer may use.

    must: the answer is calls and nothing else.  only: one of them that it must be; None: any.
    parallel: it may be several calls.
    """

    tools: tuple[Function, ...]
    must: bool
    only: str | None
    parallel: bool

    @property
    def callable(self) -> list[tuple[int, Function]]:
        """The functions that may be called, with their places in the request."""
        return [(i, f) for i, f in enumerate(self.tools) if self.only in (None, f.name)]

    @property
    def strict(self) -> bool:
        """Some function's arguments are to be held to its schema, also where text may be written."""
        return any(function.strict for function in self.tools)

    @property
    def described(self) -> list[dict[str, Any]]:
        """What chat templates are given."""
        return [{"type": "function", "function": _described(f)} for f in self.tools]

    @property
    def digest(self) -> str:
        """Of what the prompt says of them."""
        return "sha256:" + hashlib.sha256(msgspec.json.encode(self.described)).hexdigest()


def tool_use(
    tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """None where no tool may be called: the model is not told of any then. Raises InvalidRequest."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("needs tools", param="tool_choice")
        return None
    functions = tuple(tool.function for tool in tools)
    _check_names([function.name for function in functions])
    for index, function in enumerate(functions):
        if nested_too_deeply(function.parameters):
            param = f"tools[{index}].function.parameters"
            raise InvalidRequest("is nested too deeply", param=param)
    only = choice.function.name if isinstance(choice, NamedTool) else None
    if only is not None and only not in {function.name for function in functions}:
        raise InvalidRequest(f"{only[:64]!r} is not among the tools", param="tool_choice")
    if choice == "none":
        return None
    must = choice == "required" or only is not None
    return ToolUse(functions, must, only, parallel is not False)


def _check_names(names: list[str]) -> None:
    if len(names) > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools", param="tools")
    for index, name in enumerate(names):
        param = f"tools[{index}].function.name"
        if not _NAME.fullmatch(name):
            raise InvalidRequest("has 1 to 64 letters, digits, `_`, `-` or `.`", param=param)
        if name in names[:index]:
            raise InvalidRequest(f"{name!r} is there twice", param=param)


def _described(function: Function) -> dict[str, Any]:
    parameters = NO_PARAMETERS if function.parameters is None else function.parameters
    return {
        "name": function.name,
        "description": function.description or "",
        "parameters": parameters,
    }
