"""The kind of text that two prompts first differ in."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyloom.platform.generation.differences import text_difference

CASES = [
    ("timestamp", "It is 2026-11-29T22:13:11Z now.", "It is 2026-11-29T22:14:02Z now."),
    ("timestamp", "Today is 2026-11-29.", "Today is 2026-12-01."),
    ("timestamp", "Current time: 22:13", "Current time: 09:58"),
    ("timestamp", "Date: Sunday, November 29, 2026", "Date: Monday, November 30, 2026"),
    ("timestamp", "Sun, 29 Nov 2026 22:13:11", "Mon, 30 Nov 2026 01:00:00"),
    ("timestamp", "ts=1764454391 go", "ts=1764454392 go"),
    ("timestamp", "ts 1764454391123.", "ts 1764454999123."),
    ("secret", "key sk-abcdefgh12345678 end", "key sk-abcdxxxx87654321 end"),
    ("secret", "Authorization: Bearer aaaabbbb", "Authorization: Bearer aaaacccc"),
    ("secret", 'password="hunter22"', 'password="hunter23"'),
    ("id", f"id {uuid.UUID(int=1)} x", f"id {uuid.UUID(int=2**100)} x"),
    ("id", "run 4f9a1c0b77de23aa91 x", "run 4f9a1c0bd1e8f00123 x"),
    ("id", "req_aB3dE5fG7hJ9kL1m", "req_aB3dE5fG7hJ9kL2n"),
    ("number", "You have 3 tickets", "You have 5 tickets"),
    ("text", "You are a helpful bot", "You are a hopeful bot"),
    ("text", "Your name is Marvin.", "Your name is Martin."),
    ("text", "Answer in French.", "Answer in 2026-01-01."),
    ("text", "Same", "Same and more"),
]


@pytest.mark.parametrize(("kind", "first", "second"), CASES)
def test_kinds_are_told_apart_either_way_round(kind: str, first: str, second: str) -> None:
    for one, other in ((first, second), (second, first)):
        found = text_difference("Some system prompt.\n" + one, "Some system prompt.\n" + other)
        assert found is not None and found.kind == kind
        assert found.first != found.second


@given(st.text(max_size=50), st.text(max_size=50), st.text(max_size=300))
def test_any_texts_are_compared_where_they_part(one: str, other: str, before: str) -> None:
    found = text_difference(before + one, before + other)
    assert (found is None) == (one == other)
    if found is not None:
        assert found.first != found.second
