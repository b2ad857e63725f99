"""Drafts from the request's own text: what followed the longest earlier copy of its last tokens.

Nothing is kept wider than a request: a store that several share would show one's text in another's
accepted drafts.
"""

from collections.abc import Sequence as Seq

from polyloom.platform.engine.speculation.drafter import NO_PROPOSAL, DraftRow, Proposal
from polyloom.routing.scheduler.sequence import Sequence

MIN_MATCH = 2  # tokens; after a single one anything may follow
_MAX_MATCH = 32  # a longer match is no surer
_MAX_PLACES = 24  # that are compared; the latest ones


class NgramDrafter:
    """Copies from the prompt and the output of each request."""

    name = "ngram"
    needs_hidden = False
    looks_up = True

    def __init__(self) -> None:
        self._indexes: dict[str, SuffixIndex] = {}

    def serves(self, sequence: Sequence) -> bool:
        return True

    def propose(self, rows: Seq[DraftRow]) -> list[Proposal]:
        return [self._propose(row) for row in rows]

    def close(self, sequence_id: str) -> None:
        self._indexes.pop(sequence_id, None)

    def _propose(self, row: DraftRow) -> Proposal:
        index = self._indexes.get(row.sequence.sequence_id)
        if index is None:
            index = self._indexes[row.sequence.sequence_id] = SuffixIndex()
        end, matched = index.longest_match(row.sequence.tokens)
        if not matched:
            return NO_PROPOSAL
        draft = _continuation(row.sequence.tokens, end, row.length)
        return Proposal(draft, (1.0 - 0.5 ** (matched / 3),) * len(draft))


class SuffixIndex:
    """Where each pair of neighbouring tokens of one growing sequence occurs, latest first."""

    def __init__(self) -> None:
        self._latest: dict[int, int] = {}  # pair, as one number -> position of its second token
        self._earlier: list[int] = []  # position -> the same pair's occurrence before; -1 for none

    def longest_match(self, tokens: Seq[int]) -> tuple[int, int]:
        """Where an earlier copy of the last tokens ends (the position after it), and its length.

        tokens: those of the call before, and more.  The longest of the latest places, of equals
        the latest; (0, 0) where no two tokens match.
        """
        self._extend(tokens)
        last = len(tokens) - 1
        place, best_end, best = self._earlier[last], 0, 0
        for _ in range(_MAX_PLACES):
            if place < 0:
                break
            matched = _common_suffix(tokens, place, last)
            if matched > best:
                best_end, best = place + 1, matched
                if best == _MAX_MATCH:
                    break
            place = self._earlier[place]
        return best_end, best

    def _extend(self, tokens: Seq[int]) -> None:
        latest, earlier = self._latest, self._earlier
        if not earlier:
            earlier.append(-1)
        for position in range(len(earlier), len(tokens)):
            pair = tokens[position - 1] << 32 | tokens[position]
            earlier.append(latest.get(pair, -1))
            latest[pair] = position


def _common_suffix(tokens: Seq[int], place: int, last: int) -> int:
    """Tokens that agree, counted backwards from two positions whose pairs are equal."""
    matched = MIN_MATCH
    while (
        matched < _MAX_MATCH
        and place >= matched
        and tokens[place - matched] == tokens[last - matched]
    ):
        matched += 1
    return matched


def _continuation(tokens: Seq[int], end: int, length: int) -> tuple[int, ...]:
    """The `length` tokens after position `end`; beyond the sequence the draft follows itself, so
    a period goes on."""
    draft = list(tokens[end : end + length])
    period = len(tokens) - end
    while len(draft) < length:
        draft.append(draft[len(draft) - period])
    return tuple(draft)
