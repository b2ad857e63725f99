"""Drafts for sequences with a grammar: what it forces, and of other drafts only what it takes."""

from collections.abc import Sequence as Seq

from polyloom.platform.engine.errors import GrammarError
from polyloom.platform.engine.speculation.drafter import NO_PROPOSAL, Drafter, DraftRow, Proposal
from polyloom.platform.engine.structured.sequences import SequenceGrammars
from polyloom.routing.scheduler.sequence import Sequence


class GrammarDrafter:
    """Tokens that must follow, as the tokenizer would write them.

    At each of them the mask leaves nothing else, so every one is accepted.
    """

    name = "grammar"
    needs_hidden = False
    looks_up = True

    def __init__(self, grammars: SequenceGrammars) -> None:
        self._grammars = grammars

    def serves(self, sequence: Sequence) -> bool:
        return self._grammars.matcher(sequence.sequence_id) is not None

    def propose(self, rows: Seq[DraftRow]) -> list[Proposal]:
        return [self._propose(row) for row in rows]

    def close(self, sequence_id: str) -> None:
        """Nothing is kept here."""

    def _propose(self, row: DraftRow) -> Proposal:
        matcher = self._grammars.matcher(row.sequence.sequence_id)
        if matcher is None:
            return NO_PROPOSAL
        try:
            forced = matcher.forced(row.length)
        except GrammarError:  # the step's own mask meets it too, and ends the sequence
            return NO_PROPOSAL
        return Proposal(forced, (1.0,) * len(forced))


class FittingDrafter:
    """Another drafter's proposals up to the first token that the sequence's grammar refuses."""

    def __init__(self, drafter: Drafter, grammars: SequenceGrammars) -> None:
        self._drafter = drafter
        self._grammars = grammars

    @property
    def name(self) -> str:
        return self._drafter.name

    @property
    def needs_hidden(self) -> bool:
        return self._drafter.needs_hidden

    @property
    def looks_up(self) -> bool:
        return self._drafter.looks_up

    def serves(self, sequence: Sequence) -> bool:
        return self._drafter.serves(sequence)

    def propose(self, rows: Seq[DraftRow]) -> list[Proposal]:
        proposals = self._drafter.propose(rows)
        return [self._fitting(*pair) for pair in zip(rows, proposals, strict=True)]

    def close(self, sequence_id: str) -> None:
        self._drafter.close(sequence_id)

    def _fitting(self, row: DraftRow, proposal: Proposal) -> Proposal:
        matcher = self._grammars.matcher(row.sequence.sequence_id)
        if matcher is None or not proposal.tokens:
            return proposal
        try:
            fit = matcher.fitting(proposal.tokens)
        except GrammarError:
            return NO_PROPOSAL
        return Proposal(proposal.tokens[:fit], proposal.confidences[:fit])
