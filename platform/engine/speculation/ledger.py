"""What drafts brought and cost, by kind of request: counters for reports and metrics."""

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from polyloom.platform.engine.messages import SpeculationLine
from polyloom.platform.engine.speculation.acceptance import Kind

MAX_LINES = 1024  # of kinds, those used last; older ones are summed up
OTHER = "other"  # revision and domain of that sum; no digest reads so


@dataclass(slots=True)
class Line:
    """Counters of one kind; fields as in `SpeculationLine`."""

    steps_at_zero: int = 0
    proposals_by_length: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0
    rejected_seconds: float = 0.0
    margin: float = 0.0
    decision: int = 0

    @property
    def steps(self) -> int:
        return sum(self.proposals_by_length)

    @property
    def drafted(self) -> int:
        return _weighted(self.proposals_by_length)

    @property
    def accepted(self) -> int:
        return _weighted(self.accepted_lengths)

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Of how many drafts the first, the second, … token was right."""
        lengths = self.accepted_lengths
        return tuple(sum(lengths[position:]) for position in range(1, len(lengths)))

    def verified(
        self,
        length: int,
        matched: int,
        *,
        margin: float,
        decode: float,
        verify: float,
        rejected: float,
    ) -> None:
        """A draft of `length` tokens was verified, its first `matched` were right.

        decode, verify, rejected: seconds of the sequence's part of the step: of its own token, of
        the drafted ones, and of drafting and verifying those that did not come out.
        """
        self.margin, self.decision = margin, length
        _count(self.proposals_by_length, length)
        _count(self.accepted_lengths, matched)
        self.decode_seconds += decode
        self.verify_seconds += verify
        self.rejected_seconds += rejected

    def at_zero(self, steps: int, draft: float) -> None:
        """`steps` without a draft of this drafter. draft: seconds that it has spent since what was
        counted before, in steps with a draft too."""
        self.steps_at_zero += steps
        self.decision = 0 if steps else self.decision
        self.draft_seconds += draft

    def add(self, other: "Line") -> None:
        """Count in what another line has counted; its last decision is the newer one."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _HISTOGRAMS:
            mine = getattr(self, name)
            for place, count in enumerate(getattr(other, name)):
                _count(mine, place, count)
        self.margin, self.decision = other.margin, other.decision


_SUMS = (
    "steps_at_zero", "draft_seconds", "verify_seconds", "decode_seconds", "rejected_seconds",
)  # fmt: skip
_HISTOGRAMS = ("proposals_by_length", "accepted_lengths")


class Ledger:
    """A line for each kind of request and drafter; sums that only grow, whoever labels requests."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Kind, Line] = OrderedDict()
        self._others: dict[Kind, Line] = {}

    def __getitem__(self, kind: Kind) -> Line:
        line = self._lines.get(kind)
        if line is None:
            line = self._lines[kind] = Line()
            if len(self._lines) > MAX_LINES:
                self._sum_up(*self._lines.popitem(last=False))
        else:
            self._lines.move_to_end(kind)
        return line

    def _sum_up(self, kind: Kind, line: Line) -> None:
        other = msgspec.structs.replace(kind, revision=OTHER, domain=OTHER)
        self._others.setdefault(other, Line()).add(line)

    def lines(self) -> tuple[SpeculationLine, ...]:
        """Sums of older kinds, then the others, those used last at the end."""
        return tuple(
            SpeculationLine(
                revision=kind.revision,
                drafter=kind.drafter,
                domain=kind.domain,
                temperature=kind.temperature,
                steps=line.steps,
                steps_at_zero=line.steps_at_zero,
                drafted=line.drafted,
                accepted=line.accepted,
                proposals_by_length=tuple(line.proposals_by_length),
                accepted_by_position=line.accepted_by_position,
                accepted_lengths=tuple(line.accepted_lengths),
                draft_seconds=line.draft_seconds,
                verify_seconds=line.verify_seconds,
                decode_seconds=line.decode_seconds,
                rejected_seconds=line.rejected_seconds,
                margin=line.margin,
                decision=line.decision,
            )
            for kind, line in (*self._others.items(), *self._lines.items())
        )


def _count(histogram: list[int], place: int, times: int = 1) -> None:
    if place >= len(histogram):
        histogram.extend([0] * (place + 1 - len(histogram)))
    histogram[place] += times


def _weighted(histogram: list[int]) -> int:
    """Tokens of all drafts, from how many drafts have how many."""
    return sum(length * drafts for length, drafts in enumerate(histogram))
