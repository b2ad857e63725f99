"""What an answer with tools must match."""

import json

from polyloom.platform.engine.structured.source import inline_json
from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.answer_formats import AnswerFormat, schema_format
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.platform.generation.tools.formats import ToolFormat
from polyloom.platform.generation.tools.requests import NO_PARAMETERS, Function, ToolUse

MAX_CALLS = 16
_FREE = r"TEXT: /(.|\n)*/"
_NO_OBJECT = r"TEXT: /([^\s{](.|\n)*)?/"


def argument_schemas(use: ToolUse) -> list[AnswerFormat]:
    """The schema of each function that may be called, to be checked by itself. Raises what
    `schema_format` does."""
    return [
        schema_format(function.parameters, f"tools[{index}].function.parameters")
        for index, function in use.callable
        if function.parameters is not None
    ]


def tool_grammar(
    use: ToolUse, form: ToolFormat, tokenizer: TextTokenizer, answer: AnswerFormat | None
) -> AnswerFormat | None:
    """The answer's grammar, of calls and of what may stand in their place; None where anything may.

    answer: what text has to be, if the model writes text.  Raises InvalidRequest where calls and
    such a text could not be told apart.
    """
    calls = _Calls(use, form, tokenizer)
    if use.must:
        return _lark([*calls.rules, "start: calls"])
    if answer is not None:
        if answer.kind != "json_schema" or form.bare:
            message = "cannot be combined with tools that the model may leave alone"
            raise InvalidRequest(message, param=answer.param)
        return _lark(
            [
                *calls.rules,
                "start: calls | answer",
                f"answer: {inline_json(json.loads(answer.text))}",
            ]
        )
    if use.parallel and not use.strict:
        return None
    return _lark([*calls.rules, *calls.after_text])


class _Calls:
    """Rules of Lark for `calls` in one family's form."""

    def __init__(self, use: ToolUse, form: ToolFormat, tokenizer: TextTokenizer) -> None:
        self._form = form
        self._parallel = use.parallel
        self._opening = _mark(form.opening, tokenizer)
        self._closing = _mark(form.closing, tokenizer)
        self._functions = [function for _, function in use.callable]

    @property
    def rules(self) -> list[str]:
        names = [f"function_{index}" for index in range(len(self._functions))]
        bodies = [
            f"{name}: {_object(function, self._form.arguments)}"
            for name, function in zip(names, self._functions, strict=True)
        ]
        opening = "" if self._form.bare else self._opening
        return [f"calls: {opening} {self._rest}", f"call: {' | '.join(names)}", *bodies]

    @property
    def after_text(self) -> list[str]:
        """`start` of an answer that is text, or calls after some text."""
        if self._form.bare:
            return ["start: TEXT | calls", _NO_OBJECT]
        if self._opening.startswith("<"):
            lead = f"lead: TEXT {self._opening}"
        else:
            lead = f"lead[lazy]: TEXT {self._opening}"
        return [f"start: TEXT | lead {self._rest}", lead, _FREE]

    @property
    def _rest(self) -> str:
        """All of the calls after the first opening."""
        if self._form.bare:
            return "call"
        if self._form.listed:
            more = self._more('", " call')
            return f'"[" call {more} "]" {self._closing}'
        one = f'"\\n" call "\\n" {self._closing}'
        more = self._more(f'"\\n" {self._opening} {one}')
        return f"{one} {more}"

    def _more(self, term: str) -> str:
        return f"({term}){{0,{MAX_CALLS - 1}}}" if self._parallel else ""


def _object(function: Function, arguments: str) -> str:
    """One call, as the family writes it."""
    start = f'{{"name": {json.dumps(function.name)}, "{arguments}": '
    parameters = NO_PARAMETERS if function.parameters is None else function.parameters
    return f'{json.dumps(start)} {inline_json(parameters)} "}}"'


def _mark(mark: str, tokenizer: TextTokenizer) -> str:
    """A mark as a term: by its id where it is a special token, which no text matches."""
    if not mark:
        return ""
    token_id = tokenizer.special_id(mark)
    return json.dumps(mark) if token_id is None else f"<[{token_id}]>"


def _lark(rules: list[str]) -> AnswerFormat:
    return AnswerFormat("lark", "\n".join(rules) + "\n", "tools")
