"""How many tokens of each draft to verify: as many as pay, over the whole batch at once.

A step that verifies `n` drafted tokens brings one token of each sequence, and each drafted token
with the chance that it and all before it are accepted. The lengths taken are those with the most
expected tokens per second. The chances of one draft only fall along it, so the best `n` tokens of
all drafts are prefixes of them.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    """lengths: of each draft, what is to be verified.  rate: expected tokens per second;
    rate_without: of the same step without drafts."""

    lengths: list[int]
    rate: float
    rate_without: float

    @property
    def margin(self) -> float:
        """How much faster than without drafts, as a share."""
        return self.rate / self.rate_without - 1.0 if self.rate_without > 0 else 0.0


def best_lengths(
    survivals: Seq[Seq[float]],
    sequences: int,
    room: int,
    seconds: Callable[[int], float],
) -> Choice:
    """The lengths of drafts that pay best together.

    survivals: of each draft, the chance that each token and all before it are accepted.
    sequences: that get a token in any case, more than 0.  room: drafted tokens at most.
    seconds: of the step with so many drafted tokens, the drafting included.
    """
    tokens = [(-chance, draft) for draft, chances in enumerate(survivals) for chance in chances]
    tokens.sort()
    expected = float(sequences)
    rate_without = best_rate = expected / seconds(0)
    best = 0
    for count, (negative, _) in enumerate(tokens[:room], 1):
        expected -= negative
        rate = expected / seconds(count)
        if rate > best_rate:
            best_rate, best = rate, count
    lengths = [0] * len(survivals)
    for _, draft in tokens[:best]:
        lengths[draft] += 1
    return Choice(lengths, best_rate, rate_without)
