"""What one step runs."""

from dataclasses import dataclass

import msgspec

from polyloom.adapters.errors import AdapterError
from polyloom.routing.scheduler.sequence import Sequence


class ScheduledSequence(msgspec.Struct, frozen=True):
    """Tokens `[start, start + num_tokens)` of one sequence.

    completes: they are its last ones, so the next token can be sampled after them.
    draft: the last of them are these, which are guessed: not the sequence's own yet.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    completes: bool
    draft: tuple[int, ...] = ()

    @property
    def token_ids(self) -> list[int]:
        """What runs."""
        return [*self.sequence.tokens[self.start : self.start + self.num_tokens], *self.draft]

    @property
    def decodes(self) -> bool:
        """It is the newest token of a sequence that generates, and perhaps a draft after it; not a
        piece of a prompt."""
        own = self.num_tokens - len(self.draft)
        return own == 1 and self.start >= self.sequence.prompt_len

    @property
    def attended(self) -> float:
        """Tokens that its tokens look back at, summed over them."""
        return self.num_tokens * (self.start + (self.num_tokens + 1) / 2)

    @property
    def samples(self) -> bool:
        """A token is to be sampled: a sequence may want none, only its prompt's logprobs."""
        return self.completes and self.sequence.request.sampling.max_tokens > 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: sequences with tokens of the same revision adjacent, the base's first.

    failed: sequences whose adapter could not be loaded; their blocks and pins are free already.
    """

    scheduled: tuple[ScheduledSequence, ...]
    failed: tuple["FailedSequence", ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class FailedSequence:
    """A sequence whose adapter cannot be loaded, and why."""

    sequence: Sequence
    error: AdapterError


def adapter_order(item: ScheduledSequence) -> str:
    """Sort key that puts tokens of one revision next to each other, the base's first."""
    return item.sequence.adapter_digest or ""


class PlanBuilder:
    """The step being planned: its items by sequence, and the prompt tokens it may still take."""

    def __init__(self) -> None:
        self.items: dict[str, ScheduledSequence] = {}
        self.budget = 0

    def add_decode(self, sequence: Sequence) -> None:
        """The one token that a decoding sequence has to run."""
        item = ScheduledSequence(sequence, sequence.computed, 1, True)
        self.items[sequence.sequence_id] = item

    def add_chunk(self, sequence: Sequence) -> None:
        """As much of the sequence's pending tokens as the budget allows, once."""
        num_tokens = min(sequence.pending, self.budget)
        if num_tokens > 0 and sequence.sequence_id not in self.items:
            completes = num_tokens == sequence.pending
            item = ScheduledSequence(sequence, sequence.computed, num_tokens, completes)
            self.items[sequence.sequence_id] = item
            self.budget -= num_tokens

    def drop(self, sequence: Sequence) -> None:
        """The sequence does not run after all."""
        self.items.pop(sequence.sequence_id, None)
