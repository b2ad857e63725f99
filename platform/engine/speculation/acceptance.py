"""How likely a drafted token is accepted, from what was: measured, decayed, and shrunk to a prior.

A token's acceptance is looked up by its position in the draft and by how sure its drafter was, in
two tables, one the prior of the other: of the drafter, and of one kind of request on it. So a
revision with few samples begins where its drafter stands with everybody. Last comes how the request
itself has done against what was expected of it.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from polyloom.platform.engine.speculation.drafter import Proposal
from polyloom.routing.scheduler.sequence import Sequence

TemperatureBand = Literal["greedy", "low", "medium", "high"]

MAX_KINDS = 2048  # tables that are kept, those used last

_POSITIONS = 8  # later ones count as the last of them
_BANDS = (0.3, 0.6, 0.85)  # of confidence: upper bounds
_UNSURE = 1  # the band of a token without a confidence
_FIRST_GUESS = (0.2, 0.4, 0.6, 0.8)  # before anything was measured, by band
_HOPELESS = 0.02  # chance below which the rest of a draft is not considered
_DECAY = 0.98  # what a trial keeps of its weight with each later one of its cell
_SUREST = 0.99
_PRIOR_TRIALS = (4.0, 6.0, 6.0)  # what a table's prior weighs, in trials; the request's last


@dataclass(frozen=True, slots=True)
class Kind:
    """What requests are told apart by: each has a table, and a line in the report.

    revision: digest of the adapter's revision, None for the base alone.  domain: the request's
    label, or its route.
    """

    revision: str | None
    drafter: str
    domain: str
    temperature: TemperatureBand

    @classmethod
    def of(cls, sequence: Sequence, drafter: str) -> "Kind":
        request = sequence.request
        temperature = temperature_band(request.sampling.temperature)
        return cls(sequence.adapter_digest, drafter, request.domain, temperature)


def temperature_band(temperature: float) -> TemperatureBand:
    """greedy: 0; low: to 0.5; medium: to 1."""
    if temperature == 0.0:
        return "greedy"
    if temperature <= 0.5:
        return "low"
    return "medium" if temperature <= 1.0 else "high"


def confidence_band(confidence: float) -> int:
    """The class of tokens that share a cell."""
    return sum(confidence > bound for bound in _BANDS)


class _Table:
    """Accepted and tried tokens by cell, decayed."""

    __slots__ = ("accepted", "tried")

    def __init__(self, cells: int) -> None:
        self.accepted = [0.0] * cells
        self.tried = [0.0] * cells

    def count(self, cell: int, accepted: bool) -> None:
        self.accepted[cell] = self.accepted[cell] * _DECAY + accepted
        self.tried[cell] = self.tried[cell] * _DECAY + 1.0


class _Record:
    """Of one request: accepted tokens, and how many were expected, decayed."""

    __slots__ = ("accepted", "expected")

    def __init__(self) -> None:
        self.accepted = self.expected = 0.0

    def count(self, expected: float, accepted: bool) -> None:
        self.accepted = self.accepted * _DECAY + accepted
        self.expected = self.expected * _DECAY + expected

    @property
    def correction(self) -> float:
        """Of an estimate, for this request."""
        weight = _PRIOR_TRIALS[2]
        return (self.accepted + weight) / (self.expected + weight)


@dataclass(frozen=True, slots=True)
class _Expected:
    """A survival that holds until the drafter's next trial."""

    trials: int
    length: int
    survival: list[float]


class AcceptanceModel:
    """Estimates for drafts to come, from the drafts that were verified."""

    def __init__(self) -> None:
        self._drafters: dict[tuple[str, TemperatureBand], _Table] = {}
        self._kinds: OrderedDict[Kind, _Table] = OrderedDict()
        self._requests: dict[tuple[str, str], _Record] = {}
        self._sequence_kinds: dict[tuple[str, str], Kind] = {}
        self._trials: dict[str, int] = {}  # verified drafts, by drafter
        self._expected: dict[tuple[str, str], _Expected] = {}

    def survival(self, sequence: Sequence, drafter: str, proposal: Proposal) -> list[float]:
        """For each token of a proposal, the chance that it and all before it are accepted; as far
        as there is one worth mentioning."""
        return self._survival(sequence, drafter, bands(proposal))

    def expected_survival(self, sequence: Sequence, drafter: str, length: int) -> list[float]:
        """The same of a proposal of `length` tokens that is not there yet."""
        key, trials = (sequence.sequence_id, drafter), self._trials.get(drafter, 0)
        known = self._expected.get(key)
        if known is None or known.trials != trials or known.length != length:
            survival = self._survival(sequence, drafter, [_UNSURE] * length, whatever=True)
            known = self._expected[key] = _Expected(trials, length, survival)
        return known.survival

    def verified(
        self, sequence: Sequence, drafter: str, proposal: Proposal, matched: int, mismatch: bool
    ) -> None:
        """The first `matched` tokens were the target's; `mismatch`: and the next was not."""
        self._trials[drafter] = self._trials.get(drafter, 0) + 1
        kind = self._kind_of(sequence, drafter)
        pooled = self._drafters.setdefault((drafter, kind.temperature), _kind_table())
        own = self._own_table(kind)
        record = self._requests.setdefault((sequence.sequence_id, drafter), _Record())
        for position, band in enumerate(bands(proposal)[: matched + mismatch]):
            accepted, place = position < matched, min(position, _POSITIONS - 1)
            record.count(_estimate(pooled, own, _cell(place, band), band), accepted)
            for cell in (_cell(place, band), _cell(place, None)):
                pooled.count(cell, accepted)
                own.count(cell, accepted)

    def close(self, sequence_id: str, drafters: Seq[str]) -> None:
        """The request has ended."""
        for drafter in drafters:
            self._requests.pop((sequence_id, drafter), None)
            self._sequence_kinds.pop((sequence_id, drafter), None)
            self._expected.pop((sequence_id, drafter), None)

    def _survival(
        self, sequence: Sequence, drafter: str, drafted: Seq[int], whatever: bool = False
    ) -> list[float]:
        """whatever: of tokens of any band."""
        kind = self._kind_of(sequence, drafter)
        pooled = self._drafters.get((drafter, kind.temperature), _EMPTY)
        own = self._kinds.get(kind, _EMPTY)
        record = self._requests.get((sequence.sequence_id, drafter), _NO_RECORD)
        correction, last = record.correction, _POSITIONS - 1
        chance, survival = 1.0, []
        for position, band in enumerate(drafted):
            place = min(last, position)
            estimate = _estimate(pooled, own, _cell(place, None if whatever else band), band)
            chance *= min(estimate * correction, _SUREST)
            if chance < _HOPELESS:
                break
            survival.append(chance)
        return survival

    def _kind_of(self, sequence: Sequence, drafter: str) -> Kind:
        key = sequence.sequence_id, drafter
        kind = self._sequence_kinds.get(key)
        if kind is None:
            kind = self._sequence_kinds[key] = Kind.of(sequence, drafter)
        return kind

    def _own_table(self, kind: Kind) -> _Table:
        table = self._kinds.pop(kind, None) or _kind_table()
        self._kinds[kind] = table
        while len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return table


def bands(proposal: Proposal) -> list[int]:
    """Confidence bands of a proposal's tokens."""
    if not proposal.confidences:
        return [_UNSURE] * len(proposal.tokens)
    return [confidence_band(confidence) for confidence in proposal.confidences]


def _cell(place: int, band: int | None) -> int:
    """Five cells a position: one a band, and one for all bands together."""
    return place * 5 + (4 if band is None else band)


def _kind_table() -> _Table:
    return _Table(_POSITIONS * 5)


def _estimate(pooled: _Table, own: _Table, cell: int, band: int) -> float:
    """Of the tables alone, whose request it is left aside: one the prior of the other."""
    first, second, _ = _PRIOR_TRIALS
    prior = (pooled.accepted[cell] + first * _FIRST_GUESS[band]) / (pooled.tried[cell] + first)
    return (own.accepted[cell] + second * prior) / (own.tried[cell] + second)


_EMPTY, _NO_RECORD = _kind_table(), _Record()  # never counted in
