"""Drafters that did not pay for some sequences, and so are not asked for them for a while.

What is known of a drafter changes slowly: to consider it anew in each step costs time, and so does
asking one that only looks up.
"""

from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet

STEPS = 8  # that a drafter rests
_LOSSES = 8  # steps in a row in which what a drafter proposed was nothing to go by


class Resting:
    """Who rests, for which sequences, and how long still."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[frozenset[str], int]] = {}
        self._losses: dict[str, int] = {}  # in a row

    def begin(self, drafter: str, sequence_ids: Seq[str]) -> None:
        """Let it rest for exactly these sequences; for none, nothing changes."""
        if sequence_ids:
            self._left[drafter] = frozenset(sequence_ids), STEPS

    def skips(self, drafter: str, sequence_ids: Seq[str]) -> bool:
        """Whether it rests in a step with these sequences, which is one step of its rest."""
        ids, left = self._left.get(drafter, (frozenset(), 0))
        if not left or len(ids) != len(sequence_ids) or not ids.issuperset(sequence_ids):
            return False
        self._left[drafter] = ids, left - 1
        return True

    def proposed(
        self, drafters: AbstractSet[str], promising: AbstractSet[str], sequence_ids: Seq[str]
    ) -> None:
        """These drafters proposed for a batch, and what some proposed was `promising`. The others
        begin to rest if that goes on."""
        for name in drafters:
            losses = 0 if name in promising else self._losses.get(name, 0) + 1
            self._losses[name] = losses
            if losses >= _LOSSES:
                self.begin(name, sequence_ids)
