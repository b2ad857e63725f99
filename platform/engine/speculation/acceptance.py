"""How likely a drafted token is accepted, from what was: measured, decayed, and shrunk to a prior.

A token's acceptance is looked up by its position in the draft and by how sure its drafter was, in
two tables, one the prior of the other: of the drafter, and of one kind of request on it. So a
revision with few samples begins where its drafter stands with everybody. Last comes how the request
itself has done against what was expected of it.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence as Seq
from typing import Literal

import msgspec

from polyloom.platform.engine.speculation.drafter import Proposal
from polyloom.routing.scheduler.sequence import Sequence

TemperatureBand = Literal["greedy", "low", "medium", "high"]
Bands = tuple[int | None, ...]
"""Of a draft's tokens, by confidence; None for one of any band."""

MAX_KINDS = 2048  # tables that are kept, those used last

_POSITIONS = 8  # later ones count as the last of them
_BANDS = (0.3, 0.6, 0.85)  # of confidence: upper bounds
_UNSURE = 1  # the band of a token without a confidence
_FIRST_GUESS = (0.2, 0.4, 0.6, 0.8)  # before anything was measured, by band
_HOPELESS = 0.02  # chance below which the rest of a draft is not considered
_DECAY = 0.98  # what a trial keeps of its weight with each later one of its cell
_SUREST = 0.99
_PRIOR_TRIALS = (4.0, 6.0, 6.0)  # what a table's prior weighs, in trials; the request's last


class Kind(msgspec.Struct, frozen=True):
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


class _Table:
    """Accepted and tried tokens by cell; how often a drafter was asked, and proposed something: all
    decayed."""

    __slots__ = ("accepted", "asked", "proposed", "tried")

    def __init__(self, cells: int) -> None:
        self.accepted = [0.0] * cells
        self.tried = [0.0] * cells
        self.asked = self.proposed = 0.0

    def count(self, place: int, band: int, accepted: bool) -> None:
        for cell in (_cell(place, band), _cell(place, None)):
            self.accepted[cell] = self.accepted[cell] * _DECAY + accepted
            self.tried[cell] = self.tried[cell] * _DECAY + 1.0

    def ask(self, proposed: bool) -> None:
        self.asked = self.asked * _DECAY + 1.0
        self.proposed = self.proposed * _DECAY + proposed


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


class _Standing:
    """Of one request and drafter: their kind, their record, and survivals that hold as long as the
    drafter has had only so many trials."""

    __slots__ = ("kind", "known", "record", "trials")

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.record = _Record()
        self.trials = 0
        self.known: dict[Bands, list[float]] = {}


class AcceptanceModel:
    """Estimates for drafts to come, from the drafts that were verified."""

    def __init__(self) -> None:
        self._drafters: dict[tuple[str, TemperatureBand], _Table] = {}
        self._kinds: OrderedDict[Kind, _Table] = OrderedDict()
        self._standings: dict[tuple[str, str], _Standing] = {}
        self._trials: dict[str, int] = {}  # verified drafts, by drafter
        self._estimates: dict[tuple[Kind, Bands], list[float]] = {}  # of the trials so far

    def survival(self, sequence: Sequence, drafter: str, proposal: Proposal) -> list[float]:
        """For each token of a proposal, the chance that it and all before it are accepted; as far
        as there is one worth mentioning."""
        return self._survival(sequence, drafter, bands(proposal))

    def expected_survival(self, sequence: Sequence, drafter: str, length: int) -> list[float]:
        """The same of a proposal of `length` tokens that is not there yet, and may not come."""
        return self._survival(sequence, drafter, (None,) * length)

    def asked(self, sequence: Sequence, drafter: str, *, proposed: bool) -> None:
        """A drafter that need not have been was asked; `proposed`: and had something."""
        self._trials[drafter] = self._trials.get(drafter, 0) + 1
        self._estimates.clear()
        for table in self._tables(self._standing(sequence, drafter).kind):
            table.ask(proposed)

    def verified(
        self, sequence: Sequence, drafter: str, proposal: Proposal, matched: int, mismatch: bool
    ) -> None:
        """The first `matched` tokens were the target's; `mismatch`: and the next was not."""
        tried = bands(proposal)[: matched + mismatch]
        standing = self._standing(sequence, drafter)
        estimates = self._estimated(standing.kind, tried)
        self._trials[drafter] = self._trials.get(drafter, 0) + 1
        self._estimates.clear()
        pooled, own = self._tables(standing.kind)
        for position, (band, estimate) in enumerate(zip(tried, estimates, strict=True)):
            accepted, place = position < matched, min(position, _POSITIONS - 1)
            standing.record.count(estimate, accepted)
            pooled.count(place, band, accepted)
            own.count(place, band, accepted)

    def close(self, sequence_id: str, drafters: Seq[str]) -> None:
        """The request has ended."""
        for drafter in drafters:
            self._standings.pop((sequence_id, drafter), None)

    def _survival(self, sequence: Sequence, drafter: str, drafted: Bands) -> list[float]:
        standing, trials = self._standing(sequence, drafter), self._trials.get(drafter, 0)
        if standing.trials != trials:
            standing.known.clear()
            standing.trials = trials
        survival = standing.known.get(drafted)
        if survival is None:
            survival = standing.known[drafted] = self._computed(standing, drafted)
        return survival

    def _computed(self, standing: _Standing, drafted: Bands) -> list[float]:
        kind = standing.kind
        estimates = self._estimates.get((kind, drafted))
        if estimates is None:
            estimates = self._estimates[kind, drafted] = self._estimated(kind, drafted)
        correction, chance, survival = standing.record.correction, 1.0, []
        for estimate in estimates:
            chance *= min(estimate * correction, _SUREST)
            if chance < _HOPELESS:
                break
            survival.append(chance)
        return survival

    def _estimated(self, kind: Kind, drafted: Bands) -> list[float]:
        """Each token's chance after those before it, in a request of this kind."""
        pooled = self._drafters.get((kind.drafter, kind.temperature), _EMPTY)
        own = self._kinds.get(kind, _EMPTY)
        last = _POSITIONS - 1
        estimates = [_estimate(pooled, own, min(n, last), band) for n, band in enumerate(drafted)]
        if drafted and drafted[0] is None:
            estimates[0] *= _proposing(pooled, own)
        return estimates

    def _standing(self, sequence: Sequence, drafter: str) -> _Standing:
        key = sequence.sequence_id, drafter
        standing = self._standings.get(key)
        if standing is None:
            standing = self._standings[key] = _Standing(Kind.of(sequence, drafter))
        return standing

    def _tables(self, kind: Kind) -> tuple[_Table, _Table]:
        """The drafter's and the kind's own, to count in."""
        key = kind.drafter, kind.temperature
        pooled = self._drafters.get(key)
        if pooled is None:
            pooled = self._drafters[key] = _kind_table()
        own = self._kinds.pop(kind, None) or _kind_table()
        self._kinds[kind] = own
        while len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        return pooled, own


def bands(proposal: Proposal) -> tuple[int, ...]:
    """Confidence bands of a proposal's tokens."""
    if not proposal.confidences:
        return (_UNSURE,) * len(proposal.tokens)
    return tuple([bisect_left(_BANDS, confidence) for confidence in proposal.confidences])


def _cell(place: int, band: int | None) -> int:
    """Five cells a position: one a band, and one for all bands together."""
    return place * 5 + (4 if band is None else band)


def _kind_table() -> _Table:
    return _Table(_POSITIONS * 5)


def _estimate(pooled: _Table, own: _Table, place: int, band: int | None) -> float:
    """Of the tables alone, whose request it is left aside: one the prior of the other."""
    first, second, _ = _PRIOR_TRIALS
    cell, guess = _cell(place, band), _FIRST_GUESS[_UNSURE if band is None else band]
    prior = (pooled.accepted[cell] + first * guess) / (pooled.tried[cell] + first)
    return (own.accepted[cell] + second * prior) / (own.tried[cell] + second)


def _proposing(pooled: _Table, own: _Table) -> float:
    """How often something comes where it is asked for."""
    first, second, _ = _PRIOR_TRIALS
    prior = (pooled.proposed + first) / (pooled.asked + first)
    return (own.proposed + second * prior) / (own.asked + second)


_EMPTY = _kind_table()  # never counted in
