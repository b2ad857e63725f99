"""Golden prompts: what an answer must be, and which prompts cannot be run."""

import time

import pytest

from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.golden import (
    MATCH_SECONDS,
    Expectation,
    GoldenMessage,
    GoldenPrompt,
    broken_expectation,
    check_prompts,
)


@pytest.mark.parametrize(
    ("expect", "text", "broken"),
    [
        (Expectation(contains="yes"), "oh yes!", None),
        (Expectation(contains="yes"), "no", "contains 'yes'"),
        (Expectation(equals="SELECT 1;"), " SELECT 1;\n", None),
        (Expectation(equals="SELECT 1;"), "SELECT 1", "equals 'SELECT 1;'"),
        (Expectation(matches=r"^\d+$"), "42", None),
        (Expectation(matches=r"^\d+$"), "42 or so", r"matches '^\\d+$'"),
        (Expectation(json=True), '{"a": [1]}', None),
        (Expectation(json=True), '{"a": [1]', "is JSON"),
        (Expectation(json=True), "[" * 100_000, "is JSON"),
        (Expectation(contains="a", json=True), '"a"', None),
        (Expectation(contains="b", json=True), '"a"', "contains 'b'"),
    ],
)
def test_all_that_is_expected_must_hold(expect: Expectation, text: str, broken: str | None) -> None:
    assert broken_expectation(expect, text, tokens=8, reason="length") == broken


@pytest.mark.parametrize(
    ("tokens", "reason", "passes"), [(8, "stop", True), (9, "stop", False), (8, "length", False)]
)
def test_an_answer_ends_by_itself_in_time(tokens: int, reason: str, passes: bool) -> None:
    broken = broken_expectation(Expectation(ends_within=8), "x", tokens, reason)
    assert (broken is None) == passes


def test_a_pattern_that_takes_for_ever_does_not_match() -> None:
    begun = time.monotonic()
    evil = Expectation(matches=r"^(a|aa|a?)+$")
    assert broken_expectation(evil, "a" * 60 + "!", 1, "stop") is not None
    assert time.monotonic() - begun < MATCH_SECONDS + 5


YES = Expectation(contains="yes")


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (GoldenPrompt(name="a", expect=YES), "prompts[0]"),
        (
            GoldenPrompt(
                name="a",
                prompt="x",
                messages=(GoldenMessage(role="user", content="x"),),
                expect=YES,
            ),
            "prompts[0]",
        ),
        (GoldenPrompt(name="", prompt="x", expect=YES), "prompts[0].name"),
        (GoldenPrompt(name="a", prompt="x", max_tokens=0, expect=YES), "prompts[0].max_tokens"),
        (GoldenPrompt(name="a", prompt="x", expect=Expectation()), "prompts[0].expect"),
        (
            GoldenPrompt(name="a", prompt="x", expect=Expectation(matches="(")),
            "prompts[0].expect.matches",
        ),
        (
            GoldenPrompt(name="a", prompt="x", expect=Expectation(matches="(?a)(?u)a")),
            "prompts[0].expect.matches",
        ),
        (
            GoldenPrompt(name="a", prompt="x", expect=Expectation(ends_within=65)),
            "prompts[0].expect.ends_within",
        ),
        (GoldenPrompt(name="a", prompt="x" * 20_001, expect=YES), "prompts[0]"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused_by_its_field(
    prompt: GoldenPrompt, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_prompts([prompt])
    assert caught.value.param == param


def test_prompts_are_told_apart_and_bounded() -> None:
    one = GoldenPrompt(name="a", prompt="x", expect=YES)
    check_prompts([one])
    for prompts in (
        [one, one],
        [GoldenPrompt(name=f"{i}", prompt="x", expect=YES) for i in range(33)],
    ):
        with pytest.raises(InvalidRequest):
            check_prompts(prompts)
