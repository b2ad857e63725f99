"""Canaries: shares follow the weights, conversations stay, and a change moves no more than it must."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyloom.routing.canary import choose
from polyloom.routing.snapshot import RouteTarget

SESSIONS = [f"conversation-{i}" for i in range(4_000)]


def targets(*weights: int) -> list[RouteTarget]:
    return [RouteTarget(f"support@{i + 1}", weight) for i, weight in enumerate(weights)]


def choices(route: list[RouteTarget], name: str = "chat") -> list[str]:
    return [choose(route, "acme", name, session).model for session in SESSIONS]


@settings(max_examples=20)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any))
def test_counts_follow_the_weights(weights: list[int]) -> None:
    counts = Counter(choices(targets(*weights)))
    for target in targets(*weights):
        share = target.weight / sum(weights)
        slack = 5 * (share * (1 - share) / len(SESSIONS)) ** 0.5
        assert abs(counts[target.model] / len(SESSIONS) - share) <= slack


@settings(max_examples=20)
@given(st.lists(st.integers(0, 50), min_size=2, max_size=5).filter(any), st.data())
def test_a_grown_weight_draws_and_a_shrunk_one_gives_and_nobody_else_moves(
    weights: list[int], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(weights) - 1))
    grown = [w + 10 * (i == index) for i, w in enumerate(weights)]
    changed = f"support@{index + 1}"
    small, large = choices(targets(*weights)), choices(targets(*grown))
    moves = [(a, b) for a, b in zip(small, large, strict=True) if a != b]
    assert all(after == changed for _, after in moves)


def test_raising_a_canary_keeps_those_who_are_on_it() -> None:
    five, ten = choices(targets(95, 5)), choices(targets(90, 10))
    on_five = {s for s, model in zip(SESSIONS, five, strict=True) if model == "support@2"}
    on_ten = {s for s, model in zip(SESSIONS, ten, strict=True) if model == "support@2"}
    assert on_five < on_ten
    assert len(on_ten) == pytest.approx(400, abs=100)


@given(st.text(max_size=40), st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any))
def test_a_conversation_stays_whatever_the_order_and_scale(
    session: str, weights: list[int]
) -> None:
    route = targets(*weights)
    found = choose(route, "acme", "chat", session)
    assert found.weight > 0
    assert choose(route[::-1], "acme", "chat", session) == found
    doubled = [RouteTarget(t.model, t.weight * 2) for t in route]
    assert choose(doubled, "acme", "chat", session).model == found.model


def test_routes_and_tenants_draw_apart() -> None:
    half = targets(1, 1)
    same = [
        choose(half, "acme", "ab", s) == choose(half, "acmea", "b", s) for s in SESSIONS[:1_000]
    ]
    assert 400 < sum(same) < 600
