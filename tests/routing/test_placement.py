"""Which engine a request goes to."""

from polyloom.routing.placement.choice import SLACK, EngineView, Wish, choose

CHAIN = ("a", "b", "c")


def test_the_longest_cached_chain_wins_over_load_and_residency() -> None:
    engines = [
        EngineView(load=0, resident=frozenset({"r"})),
        EngineView(load=2, hot=frozenset({"a"})),
        EngineView(load=4, hot=frozenset({"a", "b"})),
    ]
    assert choose(engines, Wish(chain=CHAIN, adapter_digest="r")) == 2


def test_then_residency_then_load() -> None:
    engines = [EngineView(load=0), EngineView(load=3, resident=frozenset({"r"}))]
    assert choose(engines, Wish(chain=CHAIN, adapter_digest="r")) == 1
    assert choose(engines, Wish(chain=CHAIN)) == 0
    assert choose(engines, Wish(adapter_digest="other")) == 0


def test_what_was_placed_just_now_counts_as_cached() -> None:
    engines = [EngineView(load=0), EngineView(load=1)]
    assert choose(engines, Wish(chain=CHAIN, recent={"b": 1})) == 1


def test_an_overloaded_engine_is_passed_over() -> None:
    hot = frozenset(CHAIN)
    limit = 2 * SLACK
    assert choose([EngineView(), EngineView(load=limit, hot=hot)], Wish(chain=CHAIN)) == 1
    assert choose([EngineView(), EngineView(load=limit + 1, hot=hot)], Wish(chain=CHAIN)) == 0


def test_a_conversation_stays_unless_its_engine_is_gone_or_overloaded() -> None:
    wish = Wish(chain=CHAIN, home=1)
    hot = EngineView(hot=frozenset(CHAIN))
    assert choose([hot, EngineView(load=2)], wish) == 1
    assert choose([hot, EngineView(load=100)], wish) == 0
    assert choose([hot, EngineView(available=False)], wish) == 0


def test_nothing_is_chosen_where_nothing_is_available() -> None:
    assert choose([EngineView(available=False)], Wish()) is None
