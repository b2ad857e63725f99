"""Answers with tools, constrained: what a random model writes is calls that can be read."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from polyloom.platform.engine.structured.source import LIMITS, llguidance_source
from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.answer_formats import AnswerFormat
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.platform.generation.tools.formats import (
    HERMES,
    LISTED,
    LLAMA3,
    MISTRAL,
    ToolFormat,
    format_of,
)
from polyloom.platform.generation.tools.grammars import argument_schemas, tool_grammar
from polyloom.platform.generation.tools.parser import (
    ArgumentsPiece,
    CallBegun,
    TextPiece,
    ToolCallParser,
)
from polyloom.platform.generation.tools.requests import Function, ToolUse
from tests.conftest import tiny_tokenizer

WEATHER = Function(
    name="get_weather",
    parameters={
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 3}},
    },
)
NOW = Function(name="now")
FORMATS = {"hermes": HERMES, "listed": LISTED, "llama3": LLAMA3, "mistral": MISTRAL}
MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>"]


@pytest.fixture(scope="module", params=["marks are text", "marks are special tokens"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory) -> TextTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    tiny = tiny_tokenizer()
    if request.param == "marks are special tokens":
        tiny.add_special_tokens({"additional_special_tokens": MARKS})
    tiny.save_pretrained(folder)
    return TextTokenizer(folder)


@pytest.fixture(params=sorted(FORMATS))
def form(request: pytest.FixtureRequest) -> ToolFormat:
    return FORMATS[request.param]


def use_of(*, must: bool = False, only: str | None = None, parallel: bool = True) -> ToolUse:
    return ToolUse((WEATHER, NOW), must, only, parallel)


def matcher_of(asked: AnswerFormat | None, tokenizer: TextTokenizer) -> LLMatcher:
    assert asked is not None
    vocabulary = LLTokenizer(tokenizer.transformers.backend_tokenizer.to_str(), eos_token=[2])
    source = llguidance_source(asked.kind, asked.text)
    matcher = LLMatcher(vocabulary, source, limits=LIMITS, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def written(matcher: LLMatcher, tokenizer: TextTokenizer, seed: int) -> str:
    """A random walk to the end of the grammar."""
    rng, data = random.Random(seed), b""
    while not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        token = 2 if 2 in allowed else int(rng.choice(allowed.tolist()))
        matcher.consume_token(token)
        data += b"" if token == 2 else tokenizer.token_bytes(token)
    return data.decode()


def takes(matcher: LLMatcher, tokenizer: TextTokenizer, text: str) -> bool:
    """The whole text fits and may end there."""
    ids = tokenizer.encode_now(text, special_tokens=False)
    fits = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
    matcher.reset()
    return fits


def read(form: ToolFormat, text: str) -> tuple[str, list[tuple[str, object]]]:
    parser = ToolCallParser(form)
    said, calls = "", list[list[str]]()
    for event in parser.push(text) + parser.finish():
        match event:
            case TextPiece(piece):
                said += piece
            case CallBegun(_, name):
                calls.append([name, ""])
            case ArgumentsPiece(index, piece):
                calls[index][1] += piece
    return said, [(name, json.loads(arguments)) for name, arguments in calls]


def assert_calls_are_valid(calls: list[tuple[str, object]]) -> None:
    for name, arguments in calls:
        if name == "now":
            assert arguments == {}
        else:
            assert name == "get_weather"
            assert isinstance(arguments, dict)
            assert set(arguments) == {"city", "days"}
            assert arguments["city"] in ("Bern", "Rome")
            assert arguments["days"] in (1, 2, 3)


def test_required_calls_can_be_read(form, tokenizer) -> None:
    matcher = matcher_of(tool_grammar(use_of(must=True), form, tokenizer, None), tokenizer)
    for seed in range(6):
        said, calls = read(form, written(matcher.deep_copy(), tokenizer, seed))
        assert said == ""
        assert calls
        assert_calls_are_valid(calls)
    assert not takes(matcher, tokenizer, "plain words")


def test_a_named_one_is_the_only_one(form, tokenizer) -> None:
    use = use_of(must=True, only="get_weather", parallel=False)
    assert [schema.param for schema in argument_schemas(use)] == ["tools[0].function.parameters"]
    matcher = matcher_of(tool_grammar(use, form, tokenizer, None), tokenizer)
    for seed in range(3):
        said, calls = read(form, written(matcher.deep_copy(), tokenizer, seed))
        assert (said, [name for name, _ in calls]) == ("", ["get_weather"])


def test_where_text_is_free_only_calls_are_held(form, tokenizer) -> None:
    assert tool_grammar(use_of(), form, tokenizer, None) is None
    matcher = matcher_of(tool_grammar(use_of(parallel=False), form, tokenizer, None), tokenizer)
    required = matcher_of(
        tool_grammar(use_of(must=True, parallel=False), form, tokenizer, None), tokenizer
    )
    call = written(required, tokenizer, 1)
    assert takes(matcher, tokenizer, "Hello, <b> [x] wörld\n")
    assert takes(matcher, tokenizer, call)
    if not form.bare:
        assert takes(matcher, tokenizer, "Let me see. " + call)
        assert not takes(matcher, tokenizer, f"{form.opening}oops{form.closing}")
        assert not takes(matcher, tokenizer, call + call)


def test_an_answer_of_a_schema_or_a_call(form, tokenizer) -> None:
    schema = '{"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"], "additionalProperties": false}'
    answer = AnswerFormat("json_schema", schema, "response_format.json_schema.schema")
    if form.bare:
        with pytest.raises(InvalidRequest) as raised:
            tool_grammar(use_of(), form, tokenizer, answer)
        assert raised.value.param == answer.param
        return
    matcher = matcher_of(tool_grammar(use_of(), form, tokenizer, answer), tokenizer)
    assert takes(matcher, tokenizer, '{"x": 1}')
    assert not takes(matcher, tokenizer, "words")
    required = matcher_of(tool_grammar(use_of(must=True), form, tokenizer, answer), tokenizer)
    assert takes(matcher, tokenizer, written(required, tokenizer, 2))
    with pytest.raises(InvalidRequest):
        tool_grammar(use_of(), form, tokenizer, AnswerFormat("regex", "a", "regex"))


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ messages }}", LISTED),
        ("{% if tools %}<tool_call>{% endif %}", HERMES),
        ("{% if tools %}<|python_tag|>{% endif %}", LLAMA3),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
    ],
)
def test_the_template_tells_the_family(template, form) -> None:
    assert format_of(template) == form


@pytest.mark.parametrize(
    "template",
    ["{{ tools }}", "{{ tools }}[TOOL_CALLS]x[ARGS]{}", "{{ tools }}<tool_call><function=x>"],
)
def test_unknown_families_are_refused(template) -> None:
    with pytest.raises(InvalidRequest) as raised:
        format_of(template)
    assert raised.value.param == "tools"
