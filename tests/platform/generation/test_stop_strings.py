"""A stop string is found wherever the text is cut, and nothing of it is shown."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from polyloom.platform.generation.stop_strings import StopStrings


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    finder = StopStrings(stops)
    shown = "".join(finder.push(piece) for piece in pieces)
    if finder.matched is None:
        shown += finder.finish()
    return shown, finder.matched


def test_across_pieces() -> None:
    assert run(("END",), ["some E", "N", "D more"]) == ("some ", "END")


def test_inside_a_piece() -> None:
    assert run(("\n",), ["line\nnext"]) == ("line", "\n")


def test_a_beginning_that_comes_to_nothing_is_shown() -> None:
    assert run(("ENDE",), ["xEN", "DX"]) == ("xENDX", None)
    assert run(("ENDE",), ["xEND"]) == ("xEND", None)


def test_nothing_of_an_open_match_is_shown_early() -> None:
    finder = StopStrings(("stop",))
    assert finder.push("ab st") == "ab "
    assert finder.push("o") == ""
    assert finder.push("p") == ""
    assert finder.matched == "stop"


def test_the_first_to_be_complete_wins() -> None:
    assert run(("abcd", "bc"), ["xabcd"]) == ("xa", "bc")
    assert run(("bc", "abc"), ["xabc"]) == ("x", "abc")


@settings(max_examples=500)
@given(
    text=st.text(alphabet="ab", max_size=20),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 20), max_size=6),
)
def test_any_cutting_gives_the_same(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(c for c in cuts if c <= len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    whole = run(tuple(stops), [text])
    assert run(tuple(stops), pieces) == whole
    assert run(tuple(stops), list(text)) == whole
    shown, matched = whole
    assert matched is None or text.startswith(shown + matched)
    assert not any(stop in shown for stop in stops)
