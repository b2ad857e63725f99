"""The ledger: what was counted stays counted, however many kinds of requests there are."""

from polyloom.platform.engine.speculation.acceptance import Kind
from polyloom.platform.engine.speculation.ledger import MAX_LINES, OTHER, Ledger


def test_kinds_beyond_the_limit_are_summed_up() -> None:
    ledger = Ledger()
    kinds = [Kind(None, "ngram", f"d{n}", "greedy") for n in range(MAX_LINES + 3)]
    for length, kind in enumerate(kinds):
        line = ledger[kind]
        line.verified(
            1 + length % 4, length % 2, margin=0.5, decode=1.0, verify=0.5, rejected=0.375
        )
        line.at_zero(steps=1, draft=0.5)
    lines = ledger.lines()
    assert len(lines) == MAX_LINES + 1
    other = lines[0]
    assert (other.revision, other.drafter, other.domain) == (OTHER, "ngram", OTHER)
    assert (other.steps, other.steps_at_zero, other.drafted, other.accepted) == (3, 3, 6, 1)
    assert other.proposals_by_length == (0, 1, 1, 1)
    assert (other.accepted_lengths, other.accepted_by_position) == ((2, 1), (1,))
    seconds = (other.draft_seconds, other.verify_seconds, other.decode_seconds)
    assert (*seconds, other.rejected_seconds) == (1.5, 1.5, 3.0, 1.125)
    assert sum(line.drafted for line in lines) == sum(1 + n % 4 for n in range(len(kinds)))
    assert ledger[kinds[-1]].steps == 1
