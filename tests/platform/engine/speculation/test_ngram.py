"""The n-gram drafter against a search through the whole text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyloom.platform.engine.speculation.drafter import DraftRow
from polyloom.platform.engine.speculation.ngram import NgramDrafter, SuffixIndex


def longest_earlier_copy(tokens):
    """(end, length) of the latest longest earlier copy of the last tokens, at least two of them."""
    best = (0, 0)
    for end in range(2, len(tokens)):
        length = 0
        while length < min(end, 32) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= 2 and length >= best[1]:
            best = (end, length)
    return best


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 10))
def test_it_finds_the_longest_earlier_copy_however_the_text_grows(tokens, chunk):
    """Up to 24 places are compared; a text of 40 tokens of 4 kinds rarely has more."""
    index = SuffixIndex()
    for end in range(2, len(tokens) + 1, chunk):
        text = tokens[:end]
        found = index.longest_match(text)
        if sum(pair == tuple(text[-2:]) for pair in pairwise(text)) <= 25:
            assert found == longest_earlier_copy(text)


def propose(drafter, sequence, length):
    [proposal] = drafter.propose([DraftRow(sequence, length)])
    assert len(proposal.tokens) == len(proposal.confidences) <= length
    return proposal


@pytest.mark.parametrize(
    ("prompt", "output", "draft"),
    [
        ((1, 2, 3, 4, 9), (2, 3), (4, 9, 2, 3)),
        ((1, 2, 3, 4, 1, 2, 5), (0, 1, 2), (5, 0, 1, 2)),  # of equals the latest
        ((7, 1, 2, 3, 8, 1, 2, 4), (7, 1, 2), (3, 8, 1, 2)),  # the longest
        ((1, 2, 1, 2), (1, 2), (1, 2, 1, 2)),  # a period goes on
        ((5, 5, 5), (5,), (5, 5, 5, 5)),
        ((1, 2, 3, 4), (3,), ()),  # one token is no match
        ((1, 2, 3, 4), (5,), ()),
        ((1,), (2,), ()),
    ],
)
def test_what_followed_is_proposed(decoding, prompt, output, draft):
    assert propose(NgramDrafter(), decoding(prompt, output), 4).tokens == draft


def test_a_longer_match_is_surer(decoding):
    short = decoding((1, 2, 3, 9), (2, 3))
    long = decoding((*range(20), 50), range(20))
    [unsure], [sure] = (propose(NgramDrafter(), each, 1).confidences for each in (short, long))
    assert unsure < 0.5
    assert sure > 0.9


def test_nothing_is_shared_between_requests_and_nothing_is_left_of_one(decoding):
    drafter = NgramDrafter()
    first, second = decoding((1, 2, 3, 4), (1, 2)), decoding((9, 8), (1, 2))
    assert propose(drafter, first, 2).tokens == (3, 4)
    assert propose(drafter, second, 2).tokens == ()
    drafter.close(first.sequence_id)
    drafter.close(second.sequence_id)
    drafter.close("unknown")
    assert not drafter._indexes
