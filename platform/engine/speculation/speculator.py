"""Speculation as a step sees it: adds drafts to a plan, and learns from what became of them."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import torch

from polyloom.kvcache.errors import OutOfBlocksError
from polyloom.platform.engine.messages import SpeculationReport
from polyloom.platform.engine.reading import RowResult
from polyloom.platform.engine.sampler import SampledToken
from polyloom.platform.engine.speculation.acceptance import Kind
from polyloom.platform.engine.speculation.controller import Candidate, Controller, Guess, Load
from polyloom.platform.engine.speculation.drafter import Drafter
from polyloom.platform.engine.speculation.ledger import Ledger, Line
from polyloom.platform.engine.speculation.verification import matched_tokens
from polyloom.routing.drafts import MAX_DRAFT_TOKENS
from polyloom.routing.scheduler.batch import ScheduledSequence, StepPlan

_LEARNED_FROM = 2  # drafts a step, on average


class DraftBlocks(Protocol):
    """`kvcache.manager.KVCacheManager`, as far as drafts need it."""

    def reserve(self, sequence_id: str, num_tokens: int) -> None:
        """Raises OutOfBlocksError with nothing taken."""
        ...


@dataclass(slots=True)
class DraftTotals:
    """Of one sequence: drafted tokens that were the target's own, and those that were not."""

    accepted: int = 0
    rejected: int = 0


@dataclass(slots=True)
class _Followed:
    """What of one sequence is not in the ledger yet: a step with nothing to verify is to cost next
    to nothing, so those are counted here and entered together.

    kinds: by drafter that serves it.  steps: in which it might have had a draft.  lines: by drafter,
    of the drafts that were verified.  draft_seconds: by drafter.
    """

    kinds: dict[str, Kind]
    totals: DraftTotals = field(default_factory=DraftTotals)
    steps: int = 0
    lines: dict[str, Line] = field(default_factory=dict)
    draft_seconds: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        self.draft_seconds = dict.fromkeys(self.kinds, 0.0)

    def ran(self, draft_seconds: Seq[tuple[str, float]]) -> None:
        """It might have had a draft in a step."""
        self.steps += 1
        spent = self.draft_seconds
        for drafter, seconds in draft_seconds:
            if drafter in spent:
                spent[drafter] += seconds

    def line(self, drafter: str) -> Line:
        """Where its verified drafts are counted."""
        line = self.lines.get(drafter)
        if line is None:
            line = self.lines[drafter] = Line()
        return line

    def enter(self, ledger: Ledger) -> None:
        """Put it into the ledger."""
        for drafter, line in self.lines.items():
            ledger[self.kinds[drafter]].add(line)
            self.totals.accepted += line.accepted
            self.totals.rejected += line.drafted - line.accepted
        for drafter, kind in self.kinds.items():
            idle = self.steps - (self.lines[drafter].steps if drafter in self.lines else 0)
            seconds = self.draft_seconds[drafter]
            if idle or seconds:
                ledger[kind].at_zero(idle, seconds)
        self.steps = 0
        self.lines.clear()
        self.draft_seconds = dict.fromkeys(self.kinds, 0.0)


class _Drafting(msgspec.Struct, frozen=True):
    """A step of decodes. followed: of the candidates; chosen: by sequence id; draft_seconds: by
    drafter; learns: what becomes of the drafts counts for later ones."""

    load: Load
    followed: list[_Followed]
    chosen: dict[str, Guess]
    draft_seconds: dict[str, float]
    learns: bool


class _Shares(msgspec.Struct, frozen=True):
    """Seconds of one sequence in a step. decode: of its own token; verify: of each drafted one;
    draft: by drafter, of those that it was asked with."""

    decode: float
    verify: float
    draft: dict[str, float]


class Speculator:
    """The drafters of one engine. Called by the step loop: `extend`, then `ran`."""

    def __init__(self, drafters: Seq[Drafter], blocks: DraftBlocks, token_budget: int) -> None:
        """token_budget: of a step; drafts get what the plan leaves of it."""
        self.needs_hidden = any(drafter.needs_hidden for drafter in drafters)
        self._drafters = tuple(drafters)
        self._names = tuple(drafter.name for drafter in drafters)
        self._blocks = blocks
        self._token_budget = token_budget
        self._controller = Controller(drafters)
        self._ledger = Ledger()
        self._hidden: dict[str, torch.Tensor] = {}
        self._followed: dict[str, _Followed] = {}
        self._drafting: _Drafting | None = None
        self._turn = 0
        self._own_seconds = 0.0
        self._step_seconds = 0.0

    def extend(self, plan: StepPlan) -> StepPlan:
        """The plan with drafts behind its decodes' tokens; their blocks are reserved on return.

        A step with a piece of a prompt in it gets none: somebody waits for its first token. Drafts
        get what the plan leaves of the budget and of the blocks, until the step is committed.
        """
        self._drafting = None
        if not self._drafters or not all(item.decodes for item in plan.scheduled):
            return plan
        started, drafted_before = time.perf_counter(), dict(self._controller.draft_seconds)
        candidates = [c for c in map(self._candidate, plan.scheduled) if c is not None]
        load = _load(plan, self._token_budget)
        chosen = self._controller.choose(candidates, load) if candidates and load.room > 0 else {}
        if chosen:
            items = tuple([self._with_draft(item, chosen) for item in plan.scheduled])
            plan = StepPlan(items, plan.failed)
        drafting = {
            name: seconds - drafted_before[name]
            for name, seconds in self._controller.draft_seconds.items()
        }
        followed = [self._followed[c.sequence.sequence_id] for c in candidates]
        self._drafting = _Drafting(load, followed, chosen, drafting, self._learns(len(chosen)))
        own = time.perf_counter() - started - sum(drafting.values())
        self._own_seconds += own
        self._step_seconds += own + sum(drafting.values())
        return plan

    def ran(self, plan: StepPlan, results: Seq[RowResult], seconds: float) -> None:
        """The forward and the sampling of a plan took `seconds`. results: of each scheduled
        sequence. Called before a sequence that ends by them is closed."""
        if self.needs_hidden:
            for item, result in zip(plan.scheduled, results, strict=True):
                if result.hidden is not None:
                    self._hidden[item.sequence.sequence_id] = result.hidden
        drafting, self._drafting = self._drafting, None
        if drafting is None:
            return
        started = time.perf_counter()
        rows = plan.num_tokens
        shares = self._shares(drafting, rows, seconds)
        draft_seconds = tuple(shares.draft.items())
        for followed in drafting.followed:
            followed.ran(draft_seconds)
        for item, result in zip(plan.scheduled, results, strict=True):
            if item.draft:
                self._verified(drafting, item, result.sampled, shares)
        attended = sum([item.attended for item in plan.scheduled])
        self._controller.ran(rows, attended, seconds, drafted=rows > drafting.load.rows)
        own = time.perf_counter() - started
        self._own_seconds += own
        self._step_seconds += own + seconds

    def close(self, sequence_id: str) -> DraftTotals:
        """A sequence has ended; what was drafted for it in all."""
        self._hidden.pop(sequence_id, None)
        for drafter in self._drafters:
            drafter.close(sequence_id)
        self._controller.acceptance.close(sequence_id, self._names)
        followed = self._followed.pop(sequence_id, None)
        if followed is None:
            return _NOTHING
        followed.enter(self._ledger)
        return followed.totals

    def report(self) -> SpeculationReport:
        """What drafts brought and cost since the engine started."""
        for followed in self._followed.values():
            followed.enter(self._ledger)
        return SpeculationReport(
            drafters=self._names,
            lines=self._ledger.lines(),
            controller_seconds=self._own_seconds,
            step_seconds=self._step_seconds,
        )

    def _candidate(self, item: ScheduledSequence) -> Candidate | None:
        """None for a sequence that is to have no draft, or that needs only one token more."""
        sequence = item.sequence
        left = sequence.request.sampling.max_tokens - sequence.output_len - 1
        if left <= 0 or sequence.request.drafts in ("off", 0):
            return None
        hidden = self._hidden.get(sequence.sequence_id)
        followed = self._followed.get(sequence.sequence_id)
        if followed is None:
            serving = [drafter.name for drafter in self._drafters if drafter.serves(sequence)]
            followed = _Followed({name: Kind.of(sequence, name) for name in serving})
            self._followed[sequence.sequence_id] = followed
        return Candidate(sequence, min(left, MAX_DRAFT_TOKENS), hidden, followed.kinds)

    def _learns(self, drafts: int) -> bool:
        """Whether a step with so many drafts teaches: a large batch does enough in some steps, and
        in the others estimates hold."""
        self._turn += 1
        return self._turn % max(1, drafts // _LEARNED_FROM) == 0

    def _with_draft(self, item: ScheduledSequence, chosen: dict[str, Guess]) -> ScheduledSequence:
        """The item with its draft, if there are blocks for it."""
        guess = chosen.get(item.sequence.sequence_id)
        if guess is None:
            return item
        draft = guess.proposal.tokens
        num_tokens = item.num_tokens + len(draft)
        try:
            self._blocks.reserve(item.sequence.sequence_id, item.start + num_tokens)
        except OutOfBlocksError:
            return item
        return ScheduledSequence(item.sequence, item.start, num_tokens, item.completes, draft)

    def _shares(self, drafting: _Drafting, rows: int, seconds: float) -> _Shares:
        """Spread a step's seconds over its sequences. rows: drafted tokens included."""
        load, base = drafting.load, seconds
        if rows > load.rows:
            expected = self._controller.step_times.predict(load.rows, load.attended)
            base = min(expected, seconds) or seconds
        asked = len(drafting.followed)
        return _Shares(
            decode=base / load.rows,
            verify=(seconds - base) / max(rows - load.rows, 1),
            draft={name: spent / asked for name, spent in drafting.draft_seconds.items() if spent},
        )

    def _verified(
        self,
        drafting: _Drafting,
        item: ScheduledSequence,
        tokens: Seq[SampledToken],
        shares: _Shares,
    ) -> None:
        """Count one draft, and learn from it. tokens: what came out."""
        sequence_id, length = item.sequence.sequence_id, len(item.draft)
        matched = matched_tokens(item.draft, tokens)
        guess, followed = drafting.chosen[sequence_id], self._followed[sequence_id]
        if drafting.learns:
            self._controller.acceptance.verified(
                item.sequence, guess.drafter, guess.proposal, matched, matched < len(tokens)
            )
        verify = length * shares.verify
        spent = shares.draft.get(guess.drafter, 0.0) + verify
        followed.line(guess.drafter).verified(
            length,
            matched,
            margin=self._controller.margin,
            decode=shares.decode,
            verify=verify,
            rejected=(length - matched) / length * spent,
        )


_NOTHING = DraftTotals()


def _load(plan: StepPlan, token_budget: int) -> Load:
    """Of a plan of decodes."""
    rows = len(plan.scheduled)
    attended = sum([item.start + 1 for item in plan.scheduled])
    return Load(rows, attended, token_budget - rows)
