"""What every drafter is to the engine: guesses of the next tokens, never more than guesses.

Whatever a drafter proposes, the target's own tokens are what comes out; a bad guess costs time and
nothing else.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec
import torch

from polyloom.routing.scheduler.sequence import Sequence


class DraftRow(msgspec.Struct, frozen=True):
    """One sequence that wants a draft.

    sequence: read only; its last token has been sampled and has not run yet, and the draft follows
        it. `sequence.output_len` is the output position of the draft's first token.
    length: tokens wanted at most, at least 1.
    hidden: `[hidden]`, the target's final-normed state that the last token was sampled from; None
        unless some drafter of the engine has `needs_hidden`.
    """

    sequence: Sequence
    length: int
    hidden: torch.Tensor | None = None


class Proposal(msgspec.Struct, frozen=True):
    """Tokens that may follow, at most as many as were wanted, and none if there is no good guess.

    confidences: one a token, in [0, 1]: how sure the drafter is of it, given those before it.
    They need not be calibrated, only mean the same in each call: acceptance is measured by band.
    """

    tokens: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


NO_PROPOSAL = Proposal()


class Drafter(Protocol):
    """Proposes drafts for a batch of sequences. All calls come from the step loop's thread.

    State about a sequence is kept by its id, made when it is first asked for and dropped in
    `close`; a proposal depends on nothing but the row's own sequence.
    """

    @property
    def name(self) -> str:
        """In reports, metrics and settings."""
        ...

    @property
    def needs_hidden(self) -> bool:
        """Rows must have `hidden`."""
        ...

    @property
    def looks_up(self) -> bool:
        """A proposal costs microseconds: it is asked for before lengths are chosen, not after."""
        ...

    def serves(self, sequence: Sequence) -> bool:
        """Whether it can ever propose for this sequence."""
        ...

    def propose(self, rows: Seq[DraftRow]) -> list[Proposal]:
        """One proposal a row, in order."""
        ...

    def close(self, sequence_id: str) -> None:
        """Drop what is kept of a sequence; unknown ids are none."""
        ...
