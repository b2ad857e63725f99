"""A grammar that cannot constrain an answer is refused with its place, and costs only itself."""

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from polyloom.platform.engine.structured.source import check
from polyloom.platform.errors import InvalidRequest, InvalidSchema
from polyloom.platform.generation import grammar_checks
from polyloom.platform.generation.answer_formats import (
    ANY_OBJECT,
    AnswerFormat,
    JsonSchemaFormat,
    ResponseFormat,
    answer_format,
)
from polyloom.platform.generation.grammar_checks import GrammarChecks
from polyloom.routing.grammar import GrammarKind

AT = "response_format.json_schema.schema"


@pytest.fixture
def checks() -> Iterator[GrammarChecks]:
    checks = GrammarChecks()
    yield checks
    checks.close()


def of_schema(schema: dict[str, Any]) -> AnswerFormat:
    asked = ResponseFormat(
        type="json_schema", json_schema=JsonSchemaFormat(name="n", schema=schema)
    )
    found = answer_format(asked, None, None)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (ResponseFormat(type="json_schema"), "is missing"),
        (
            ResponseFormat(
                type="json_object", json_schema=JsonSchemaFormat(name="n", schema={"type": "null"})
            ),
            "does not go with the type json_object",
        ),
    ],
)
def test_a_schema_goes_with_its_type(asked: ResponseFormat, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as raised:
        answer_format(asked, None, None)
    assert raised.value.param == "response_format.json_schema"


def properties(**schemas: object) -> dict[str, Any]:
    return {"type": "object", "properties": schemas}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": 5}, ""),
        (properties(a={"type": "strin"}), "/properties/a"),
        (properties(a=properties(b={"not": {"type": "string"}})), "/properties/a/properties/b"),
        (properties(**{"x/y~": {"pattern": "(a", "type": "string"}}), "/properties/x~1y~0"),
        ({"type": "array", "items": {"uniqueItems": True, "type": "array"}}, "/items"),
        ({"anyOf": [{"type": "string"}, {"format": "foo", "type": "string"}]}, "/anyOf/1"),
        (properties(a={"$ref": "#/$defs/gone"}), "/properties/a"),
        (
            {
                "$defs": {"d": {"pattern": "(?=x)", "type": "string"}},
                **properties(a={"$ref": "#/$defs/d"}),
            },
            "/properties/a",
        ),
        ({"type": "integer", "minimum": 5, "maximum": 2}, ""),
    ],
)
async def test_the_place_is_named(checks: GrammarChecks, schema: Any, place: str) -> None:
    with pytest.raises(InvalidSchema) as raised:
        await checks.check(of_schema(schema))
    assert raised.value.param == AT + place
    assert raised.value.message.startswith(f"at {place}: " if place else "")


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {
            "$defs": {"n": properties(c={"type": "array", "items": {"$ref": "#/$defs/n"}})},
            "$ref": "#/$defs/n",
        },
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "title": "T",
            "type": "string",
            "format": "date",
        },
        properties(a={"type": "string", "description": "d", "default": "x", "examples": ["y"]}),
    ],
)
async def test_what_can_be_honoured_passes(checks: GrammarChecks, schema: Any) -> None:
    await checks.check(of_schema(schema))
    await checks.check(of_schema(schema))


def hostile() -> Iterator[AnswerFormat]:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        deep = properties(a=deep)
    doubled = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    yield AnswerFormat("json_schema", json.dumps(deep), AT)
    yield of_schema({"$ref": "#"})
    yield of_schema({"$defs": doubled | {"d30": {"type": "object"}}, "$ref": "#/$defs/d0"})
    yield of_schema(
        {"allOf": [{"anyOf": [properties(**{f"p{i}{j}": {}}) for j in range(9)]} for i in range(9)]}
    )
    yield of_schema(properties(**{f"p{i}": {"type": "string"} for i in range(6000)}))
    yield of_schema({"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"})
    yield of_schema({"type": "array", "minItems": 10**9, "items": {"type": "integer"}})
    yield AnswerFormat("regex", "(" * 100_000, "regex")
    yield AnswerFormat("regex", "(.{0,999}a.{999}|.*b){99}", "regex")
    yield AnswerFormat("lark", "start: " + '"a" | ' * 30_000 + '"b"', "grammar")


async def test_hostile_ones_end_soon(checks: GrammarChecks) -> None:
    for asked in hostile():
        started = time.thread_time()
        try:
            await checks.check(asked)
        except InvalidRequest as error:
            assert len(error.message) < 1000
        assert time.thread_time() - started < 1


@pytest.mark.parametrize(
    ("schema", "param"),
    [
        ({"examples": [1] * 200_000}, AT),
        ({"type": "array", "examples": "ä" * 140_000}, AT),
        ({"x-guidance": 5}, f"{AT}/x-guidance"),
    ],
)
def test_refused_before_anybody_looks_into_it(schema: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidSchema) as raised:
        of_schema(schema)
    assert raised.value.param == param


async def test_the_place_is_not_looked_for_for_long(
    checks: GrammarChecks, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: list[float] = []

    def slow(kind: GrammarKind, text: str) -> None:
        times.append(len(times) * 0.3)
        check(kind, text)

    monkeypatch.setattr(grammar_checks, "check", slow)
    clock = SimpleNamespace(monotonic=lambda: times[-1])
    monkeypatch.setattr(grammar_checks, "time", clock)
    good = {f"p{i}": {"type": "string"} for i in range(50)}
    with pytest.raises(InvalidSchema) as raised:
        await checks.check(of_schema(properties(**good, bad={"type": "strin"})))
    assert raised.value.param == AT
    assert len(times) == 5


def test_one_grammar_at_a_time() -> None:
    json_object = ResponseFormat(type="json_object")
    found = answer_format(json_object, None, None)
    assert found == AnswerFormat("json_schema", ANY_OBJECT, "response_format")
    assert answer_format(ResponseFormat(type="text"), "a+", None) == AnswerFormat(
        "regex", "a+", "regex"
    )
    with pytest.raises(InvalidRequest) as raised:
        answer_format(json_object, None, "start: x")
    assert raised.value.param == "grammar"
    with pytest.raises(InvalidRequest) as raised:
        answer_format(ResponseFormat(type="json_schema"), None, None)
    assert raised.value.param == "response_format.json_schema"


def test_keys_keep_the_schema_s_order() -> None:
    schema = properties(zeta={}, alpha={})
    assert list(json.loads(of_schema(schema).text)["properties"]) == ["zeta", "alpha"]


def test_a_schema_nested_beyond_all_limits() -> None:
    deep: dict[str, Any] = {}
    for levels in range(5001):
        if levels in (101, 970, 5000):
            with pytest.raises(InvalidSchema, match="too deeply"):
                of_schema(deep)
        deep = {"items": deep}
