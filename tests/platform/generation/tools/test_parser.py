"""Tool calls out of texts, whole or in any pieces."""

import json
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyloom.platform.generation.tools.formats import HERMES, LISTED, LLAMA3, MISTRAL, ToolFormat
from polyloom.platform.generation.tools.parser import (
    MAX_READINGS,
    ArgumentsPiece,
    CallBegun,
    TextPiece,
    ToolCallParser,
    ToolEvent,
    merged,
)

FORMATS = {"hermes": HERMES, "listed": LISTED, "llama3": LLAMA3, "mistral": MISTRAL}


def parsed(form: ToolFormat, *pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """The text beside the calls, and each call's name and arguments."""
    parser = ToolCallParser(form)
    events = [event for piece in pieces for event in parser.push(piece)]
    return told(events + parser.finish())


def told(events: list[ToolEvent]) -> tuple[str, list[tuple[str, str]]]:
    text, calls = "", []
    for event in events:
        match event:
            case TextPiece(piece):
                text += piece
            case CallBegun(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ArgumentsPiece(index, piece):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + piece)
    return text, calls


CALL = '{"name": "f", "arguments": {"a": [1, "}]\\"</tool_call>"]}}'
ARGUMENTS = '{"a": [1, "}]\\"</tool_call>"]}'


@pytest.mark.parametrize(
    ("form", "text", "said", "calls"),
    [
        (HERMES, f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", ARGUMENTS)]),
        (
            HERMES,
            f"Let me see.\n\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>\n",
            "Let me see.",
            [("f", ARGUMENTS)] * 2,
        ),
        (LISTED, f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", [("f", ARGUMENTS)] * 2),
        (LISTED, "<tool_call>[]</tool_call>", "", []),
        (LISTED, f"<tool_call>{CALL}</tool_call> done", "done", [("f", ARGUMENTS)]),
        (MISTRAL, f"[TOOL_CALLS] [{CALL},{CALL}]", "", [("f", ARGUMENTS)] * 2),
        (LLAMA3, '{"name": "f", "parameters": {"b": 2}}', "", [("f", '{"b": 2}')]),
        (LLAMA3, ' <|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        (
            LLAMA3,
            '{"type": "function", "name": "f"}; {"name": "g"}',
            "",
            [("f", "{}"), ("g", "{}")],
        ),
        (
            HERMES,
            '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>',
            "",
            [("f", '{"x": 1}')],
        ),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>',
            "",
            [("f", '{"x": 1}')],
        ),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": null, "id": 7}</tool_call>',
            "",
            [("f", "{}")],
        ),
        (HERMES, '<tool_call>{"id": -1.5e3, "name": "f\\u00fc"}</tool_call>', "", [("fü", "{}")]),
        (HERMES, "no call, a < b <tool_cal", "no call, a < b <tool_cal", []),
        (HERMES, "  spaced \n", "  spaced \n", []),
        (HERMES, "<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>", []),
        (HERMES, '<tool_call>{"x": 1}', '<tool_call>{"x": 1}', []),
        (HERMES, '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
        (HERMES, f"<tool_call><tool_call>{CALL}</tool_call>", "<tool_call>", [("f", ARGUMENTS)]),
        (LLAMA3, '{"answer": 42}', '{"answer": 42}', []),
        (LLAMA3, 'So: {"name": "f"}', 'So: {"name": "f"}', []),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1]', "]", [("f", '{"a": 1')]),
    ],
)
def test_what_models_write(form, text, said, calls) -> None:
    assert parsed(form, text) == (said, calls)
    assert parsed(form, *text) == (said, calls)


fragments = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "_call>", CALL,
        '{"name": "f", ', '"arguments": {"a": "', "parameters", '"}', "}", "[", "]", ",", ";", "{",
        " ", "\n", "text", '"', "\\", ":", "null", "é🙂",
    ]
)  # fmt: skip
texts = st.lists(fragments, max_size=12).map("".join)


@given(form=st.sampled_from(sorted(FORMATS)), text=texts, cuts=st.lists(st.integers(0, 200)))
def test_any_pieces_give_the_same_events(form, text, cuts) -> None:
    whole = ToolCallParser(FORMATS[form])
    expected = merged(whole.push(text) + whole.finish())
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for pieces in ([*text], [text[a:b] for a, b in pairwise(places)]):
        parser = ToolCallParser(FORMATS[form])
        events = [event for piece in pieces for event in parser.push(piece)]
        assert merged(events + parser.finish()) == expected


@given(form=st.sampled_from(sorted(FORMATS)), text=texts)
def test_without_a_call_nothing_is_lost(form, text) -> None:
    said, calls = parsed(FORMATS[form], text)
    if not calls and not any(mark in text for mark in ("</tool_call>", "]")):
        assert said == text


names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.dictionaries(st.text(max_size=5), values, max_size=3)


@given(
    form=st.sampled_from(sorted(FORMATS)),
    calls=st.lists(st.tuples(names, arguments), min_size=1, max_size=3),
    spaced=st.booleans(),
)
def test_calls_come_back_as_they_were_written(form, calls, spaced) -> None:
    written, kind = "", FORMATS[form]
    objects = [
        json.dumps({"name": name, kind.arguments: given}, indent=1 if spaced else None)
        for name, given in calls
    ]
    if kind.bare:
        written, calls = objects[0], calls[:1]
    elif kind.listed:
        written = f"{kind.opening}[{', '.join(objects)}]{kind.closing}"
    else:
        written = "\n".join(f"{kind.opening}\n{o}\n{kind.closing}" for o in objects)
    text, found = parsed(kind, *written)
    assert text == ""
    assert [(name, json.loads(given)) for name, given in found] == calls


BEGINNING = '<tool_call>{"a":['


@pytest.mark.parametrize("end", ["", "}", '"' + "x" * 5000])
@pytest.mark.parametrize("beginnings", [2, 400])
def test_beginnings_of_calls_without_an_end_cost_little(beginnings: int, end: str) -> None:
    text = BEGINNING * beginnings + end
    with patch.object(
        ToolCallParser, "_step", autospec=True, side_effect=ToolCallParser._step
    ) as step:
        assert parsed(HERMES, text) == (text, [])
    assert step.call_count <= (MAX_READINGS + 1) * len(text)


def test_arguments_before_the_name_may_be_long() -> None:
    arguments = json.dumps({"a": "x" * 3000})
    call = f'<tool_call>{{"arguments": {arguments}, "name": "f"}}</tool_call>'
    assert parsed(HERMES, call) == ("", [("f", arguments)])
