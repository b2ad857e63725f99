"""Chooses each step's drafts: who is asked, and how much of each answer is verified.

Lookups are asked for every sequence, since that costs next to nothing. A drafter that computes is
asked only where its expected tokens pay for its own time too. What comes back is cut by the
confidence in it, jointly for the batch. Where drafting does not pay the length is 0, and now and
then a short draft is verified all the same, so that a change is noticed; what such probes cost is
kept to a small share of the time.
"""

import time
from collections.abc import Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec
import torch

from polyloom.platform.engine.speculation.acceptance import AcceptanceModel
from polyloom.platform.engine.speculation.costs import StepTimes
from polyloom.platform.engine.speculation.drafter import Drafter, DraftRow, Proposal
from polyloom.platform.engine.speculation.lengths import best_lengths
from polyloom.platform.engine.speculation.resting import Resting
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.scheduler.sequence import Sequence

MAX_DEPTH = 8  # tokens that a drafter which computes is asked for
PROBE_SHARE = 0.004  # of the time, that probing may cost

_PROBE_TOKENS = 3
_LEAST_PROBE = 0.03  # of a step: what a probe is charged, however cheap its rows look
_PRICES_HOLD = 64  # steps
_PRICE_DECAY = 0.9  # a step, so that a probe's price is looked at again when the load has changed
_WORTH = 1.03  # times as fast a drafter that computes must promise to be: less is within the error
_BASELINE_EVERY = 256  # steps with drafts; then one without, so that what drafts save stays known
_PLAIN_EVERY = 4  # steps without drafts; then the seconds of one are learned from
_BATCH_TOKENS = 64  # looked up over all rows: a large batch does not verify more
_FEWEST = 4
_MANY = 8  # sequences: asking for all of them costs enough to ask for what will be verified only


class Candidate(msgspec.Struct, frozen=True):
    """A decoding sequence that may have a draft of at most `limit` tokens.

    hidden: as in `DraftRow`.  drafters: names of those that serve it.
    """

    sequence: Sequence
    limit: int
    hidden: torch.Tensor | None
    drafters: Container[str]

    @property
    def policy(self) -> DraftPolicy:
        return self.sequence.request.drafts

    @property
    def fixed(self) -> int | None:
        """Its length where the request fixes it."""
        return min(self.policy, self.limit) if isinstance(self.policy, int) else None


class Load(msgspec.Struct, frozen=True):
    """A step before drafts are added: its rows, what they attend to (as in `StepTimes`), and how
    many tokens more it may run."""

    rows: int
    attended: float
    room: int


class Guess(msgspec.Struct, frozen=True):
    """A proposal, and for each of its tokens the chance that it and all before are accepted."""

    drafter: str
    proposal: Proposal
    survival: list[float]

    @property
    def expected(self) -> float:
        """Tokens that it is expected to bring."""
        return sum(self.survival)

    def cut(self, length: int) -> "Guess":
        proposal = self.proposal
        if length >= len(proposal.tokens):
            return self
        cut = Proposal(proposal.tokens[:length], proposal.confidences[:length])
        return Guess(self.drafter, cut, self.survival[:length])


@dataclass(frozen=True, slots=True)
class _Prices:
    """Seconds of a step by its drafted tokens, as they stood at `step`: what they are to each other
    changes slowly, and a large batch asks for hundreds of them."""

    step: int
    classes: int
    seconds: list[float] = field(default_factory=list)

    def hold(self, step: int, classes: int) -> bool:
        """Whether they are still good. classes: of `StepTimes`: a new one is news."""
        return step - self.step < _PRICES_HOLD and classes == self.classes


class Controller:
    """The drafters of one engine and what was learned about them. One call at a time.

    margin: how much faster than without drafts the last step with a choice was expected to be.
    draft_seconds: spent in each drafter.
    """

    def __init__(self, drafters: Seq[Drafter]) -> None:
        self.acceptance = AcceptanceModel()
        self.step_times = StepTimes()
        self.margin = 0.0
        self.draft_seconds = {drafter.name: 0.0 for drafter in drafters}
        self._lookups = tuple(drafter for drafter in drafters if drafter.looks_up)
        self._models = tuple(drafter for drafter in drafters if not drafter.looks_up)
        self._token_times = {drafter.name: StepTimes() for drafter in drafters}
        self._allowance = 0.0  # seconds that probes may cost
        self._probes = 0
        self._probe_price = 0.0  # seconds of the one that is next, as last estimated
        self._resting = Resting()
        self._steps = 0
        self._prices: dict[int, _Prices] = {}  # by rows
        self._since_baseline: dict[int, int] = {}  # rows -> steps with drafts

    def ran(self, rows: int, attended: float, seconds: float, drafted: bool = True) -> None:
        """A step of decodes took `seconds`, its drafting not included. drafted: with drafts; of the
        many without, some tell enough."""
        if drafted or self._steps % _PLAIN_EVERY == 0 or not self.step_times.knows(rows):
            self.step_times.measured(rows, attended, seconds)
        self._allowance = min(self._allowance + PROBE_SHARE * seconds, 20 * seconds)

    def choose(self, candidates: Seq[Candidate], load: Load) -> dict[str, Guess]:
        """What to verify, by sequence id; those that are left out draft nothing."""
        self._steps += 1
        if self._since_baseline.get(load.rows, _BASELINE_EVERY) >= _BASELINE_EVERY:
            candidates = [candidate for candidate in candidates if candidate.fixed is not None]
        may_rest = all(candidate.fixed is None for candidate in candidates)
        ids = [candidate.sequence.sequence_id for candidate in candidates] if may_rest else []
        guesses, proposers = self._guesses(candidates, load, ids)
        chosen: dict[int, Guess] = {}
        if not ids or any(guess.survival for guess in guesses.values()):
            lengths = self._lengths(candidates, load, guesses)
            chosen = {place: guesses[place].cut(n) for place, n in lengths.items() if n}
        if proposers:
            promising = {guess.drafter for guess in chosen.values()}
            if len(ids) < _MANY:
                promising |= {guess.drafter for guess in guesses.values() if guess.survival}
            self._resting.proposed(proposers, promising, ids)
        if self._allowance > self._probe_price:
            chosen |= self._probe(candidates, load, guesses, chosen)
        self._probe_price *= _PRICE_DECAY
        since = self._since_baseline.get(load.rows, 0)
        self._since_baseline[load.rows] = since + 1 if chosen else 0
        return {candidates[place].sequence.sequence_id: g for place, g in chosen.items()}

    def _guesses(
        self, candidates: Seq[Candidate], load: Load, ids: list[str]
    ) -> tuple[dict[int, Guess], set[str]]:
        """The best proposal for each place, of every drafter that is worth asking there; and who
        proposed anything. ids: of the sequences, if a drafter may rest for them."""
        guesses: dict[int, Guess] = {}
        proposers = set[str]()
        looked_up = max(_FEWEST, _BATCH_TOKENS // load.rows)
        everywhere = {
            place: looked_up if candidate.fixed is None else candidate.fixed
            for place, candidate in enumerate(candidates)
        }
        for drafter in (*self._lookups, *self._models):
            if self._resting.skips(drafter.name, ids):
                continue
            lengths = everywhere
            if not drafter.looks_up:
                lengths = self._depths(drafter, candidates, load, guesses)
                if not lengths:
                    self._resting.begin(drafter.name, ids)
            answers = self._ask(drafter, candidates, lengths)
            _keep_better(guesses, answers)
            if answers:
                proposers.add(drafter.name)
        return guesses, proposers

    def _ask(
        self, drafter: Drafter, candidates: Seq[Candidate], lengths: dict[int, int]
    ) -> dict[int, Guess]:
        """What the drafter proposes for some places, at most so many tokens each."""
        name = drafter.name
        rows: dict[int, DraftRow] = {}
        for place, length in lengths.items():
            candidate = candidates[place]
            length = min(length, candidate.limit)
            if length > 0 and name in candidate.drafters:
                rows[place] = DraftRow(candidate.sequence, length, candidate.hidden)
        if not rows:
            return {}
        started = time.perf_counter()
        proposals = drafter.propose(tuple(rows.values()))
        seconds = time.perf_counter() - started
        self.draft_seconds[name] += seconds
        depth = max(len(proposal.tokens) for proposal in proposals)
        if not drafter.looks_up:
            for row, proposal in zip(rows.values(), proposals, strict=True):
                self.acceptance.asked(row.sequence, name, proposed=bool(proposal.tokens))
            if depth:
                self._token_times[name].measured(len(rows), 0.0, seconds / depth)
        return {
            place: Guess(name, proposal, self.acceptance.survival(row.sequence, name, proposal))
            for (place, row), proposal in zip(rows.items(), proposals, strict=True)
            if proposal.tokens
        }

    def _depths(
        self,
        drafter: Drafter,
        candidates: Seq[Candidate],
        load: Load,
        guesses: dict[int, Guess],
    ) -> dict[int, int]:
        """Where a drafter that computes is asked, and for how many tokens; empty if it would not pay
        even with nothing to compete with."""
        name = drafter.name
        depths: dict[int, int] = {}
        survivals: dict[int, list[float]] = {}
        for place, candidate in enumerate(candidates):
            if name not in candidate.drafters:
                continue
            if candidate.fixed is not None:
                depths[place] = 0 if place in guesses else candidate.fixed
                continue
            survivals[place] = self.acceptance.expected_survival(
                candidate.sequence, name, min(MAX_DEPTH, candidate.limit)
            )
        if not depths and not self._depth(drafter, survivals, load):
            return {}
        wanted = {
            place: survival
            for place, survival in survivals.items()
            if place not in guesses or sum(survival) > guesses[place].expected
        }
        depth = self._depth(drafter, wanted, load)
        return depths | {place: depth if place in wanted else 0 for place in survivals}

    def _depth(self, drafter: Drafter, survivals: dict[int, list[float]], load: Load) -> int:
        """The common depth that pays best for drafts with these chances, by place."""
        drafts = [survival for survival in survivals.values() if survival]
        if not drafts:
            return 0
        count, expected = len(drafts), float(load.rows)
        best, best_rate = 0, _WORTH * expected / self._seconds(load, 0)
        for depth in range(1, 1 + max(map(len, drafts))):
            if depth * count > load.room:
                break
            expected += sum(chances[depth - 1] for chances in drafts if len(chances) >= depth)
            drafting = depth * self._token_times[drafter.name].predict(count, 0.0)
            rate = expected / (self._seconds(load, depth * count) + drafting)
            if rate > best_rate:
                best, best_rate = depth, rate
        return best

    def _lengths(
        self, candidates: Seq[Candidate], load: Load, guesses: dict[int, Guess]
    ) -> dict[int, int]:
        """How much of each guess is verified."""
        lengths: dict[int, int] = {}
        room, joint = load.room, []
        for place, guess in guesses.items():
            candidate = candidates[place]
            if candidate.policy == "adaptive":
                joint.append(place)
                continue
            length = candidate.fixed
            if length is None:  # latency: what makes this one fastest, whatever the others pay
                own = best_lengths([guess.survival], 1, room, lambda n: self._seconds(load, n))
                length = own.lengths[0]
            lengths[place] = min(length, room, len(guess.proposal.tokens))
            room -= lengths[place]
        taken = load.room - room
        survivals = [guesses[place].survival for place in joint]
        most = taken + min(room, sum(map(len, survivals)))
        seconds = self._table(load, most)[taken:]
        choice = best_lengths(survivals, load.rows, room, seconds.__getitem__)
        self.margin = choice.margin
        return lengths | dict(zip(joint, choice.lengths, strict=True))

    def _probe(
        self,
        candidates: Seq[Candidate],
        load: Load,
        guesses: dict[int, Guess],
        chosen: dict[int, Guess],
    ) -> dict[int, Guess]:
        """A short draft for one of those that have none, where there is time to spare."""
        idle = [
            place
            for place, candidate in enumerate(candidates)
            if candidate.policy == "adaptive" and place not in chosen
        ]
        taken = sum(len(guess.proposal.tokens) for guess in chosen.values())
        if not idle or taken + _PROBE_TOKENS > load.room:
            return {}
        place = idle[self._probes % len(idle)]
        without = self._seconds(load, taken)
        extra = self._seconds(load, taken + _PROBE_TOKENS) - without
        extra = max(extra, _LEAST_PROBE * without)
        models = [m for m in self._models if m.name in candidates[place].drafters]
        turn = self._probes // len(idle) % (len(models) + 1)
        if turn < len(models):
            extra += _PROBE_TOKENS * self._token_times[models[turn].name].predict(1, 0.0)
        self._probe_price = extra
        if extra > self._allowance:
            return {}
        self._probes += 1
        if turn < len(models):
            probed = self._ask(models[turn], candidates, {place: _PROBE_TOKENS})
        else:
            probed = {place: guesses[place].cut(_PROBE_TOKENS)} if place in guesses else {}
        if probed:
            self._allowance -= extra
        return probed

    def _seconds(self, load: Load, drafted: int) -> float:
        """Of the step with so many drafted tokens."""
        return self._table(load, drafted)[drafted]

    def _table(self, load: Load, drafted: int) -> list[float]:
        """Seconds of the step with 0, 1, … drafted tokens, up to `drafted` at least."""
        prices = self._prices.get(load.rows)
        if prices is None or not prices.hold(self._steps, self.step_times.classes):
            prices = self._prices[load.rows] = _Prices(self._steps, self.step_times.classes)
        known = prices.seconds
        missing = range(load.rows + len(known), load.rows + drafted + 1)
        for seconds in self.step_times.predict_each(missing, load.attended / load.rows):
            known.append(max(seconds, known[-1] if known else 1e-9))  # a smaller step costs no more
        return known


def _keep_better(guesses: dict[int, Guess], others: dict[int, Guess]) -> None:
    """Replace guesses by others that are expected to bring more."""
    for place, other in others.items():
        if place not in guesses or other.expected > guesses[place].expected:
            guesses[place] = other
