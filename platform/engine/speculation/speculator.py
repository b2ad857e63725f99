"""Speculation as a step sees it: adds drafts to a plan, and learns from what became of them."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from polyloom.kvcache.errors import OutOfBlocksError
from polyloom.platform.engine.messages import SpeculationReport
from polyloom.platform.engine.sampler import SampledToken
from polyloom.platform.engine.speculation.acceptance import Kind
from polyloom.platform.engine.speculation.controller import Candidate, Controller, Guess, Load
from polyloom.platform.engine.speculation.drafter import Drafter
from polyloom.platform.engine.speculation.ledger import Ledger
from polyloom.routing.drafts import MAX_DRAFT_TOKENS
from polyloom.routing.scheduler.batch import ScheduledSequence, StepPlan

_LEARNED_FROM = 4  # drafts of one step


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

    kinds: by drafter that serves it.  steps: in which it might have had a draft.  drafted_steps,
    draft_seconds: by drafter.
    """

    kinds: dict[str, Kind]
    totals: DraftTotals = field(default_factory=DraftTotals)
    steps: int = 0
    drafted_steps: dict[str, int] = field(default_factory=dict)
    draft_seconds: dict[str, float] = field(default_factory=dict)

    def enter(self, ledger: Ledger) -> None:
        """Put it into the ledger."""
        for drafter, kind in self.kinds.items():
            idle = self.steps - self.drafted_steps.get(drafter, 0)
            seconds = self.draft_seconds.get(drafter, 0.0)
            if idle or seconds:
                ledger[kind].at_zero(idle, seconds)
        self.steps = 0
        self.drafted_steps.clear()
        self.draft_seconds.clear()


@dataclass(slots=True)
class _Drafting:
    """A step of decodes. followed: of the candidates; chosen: by sequence id; draft_seconds: by
    drafter; learned_from: sequences whose acceptance counts; matched: drafted tokens that came out,
    by sequence id; ended: in this step."""

    load: Load
    candidates: list[Candidate]
    followed: list[_Followed]
    chosen: dict[str, Guess]
    draft_seconds: dict[str, float]
    learned_from: frozenset[str]
    matched: dict[str, int] = field(default_factory=dict)
    ended: list[_Followed] = field(default_factory=list)


class Speculator:
    """The drafters of one engine. Called by the step loop: `extend`, then `verified`, `ran`."""

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
        items = plan.scheduled
        if chosen:
            items = tuple(self._with_draft(item, chosen) for item in items)
        drafting = {
            name: seconds - drafted_before[name]
            for name, seconds in self._controller.draft_seconds.items()
        }
        followed = [self._followed[c.sequence.sequence_id] for c in candidates]
        learned_from = self._learned_from(tuple(chosen))
        self._drafting = _Drafting(load, candidates, followed, chosen, drafting, learned_from)
        self._own_seconds += time.perf_counter() - started - sum(drafting.values())
        return replace(plan, scheduled=items)

    def verified(
        self, item: ScheduledSequence, tokens: Seq[SampledToken], hidden: torch.Tensor | None
    ) -> None:
        """What came out of one scheduled sequence. hidden: `[hidden]`, of the last token."""
        sequence = item.sequence
        if hidden is not None:
            self._hidden[sequence.sequence_id] = hidden
        if not item.draft or self._drafting is None:
            return
        started = time.perf_counter()
        matched = _matched(item.draft, tokens)
        guess = self._drafting.chosen[sequence.sequence_id]
        if sequence.sequence_id in self._drafting.learned_from:
            self._controller.acceptance.verified(
                sequence, guess.drafter, guess.proposal, matched, mismatch=matched < len(tokens)
            )
        followed = self._followed[sequence.sequence_id]
        followed.totals.accepted += matched
        followed.totals.rejected += len(item.draft) - matched
        line = self._ledger[followed.kinds[guess.drafter]]
        line.verified(len(item.draft), matched, self._controller.margin)
        self._drafting.matched[sequence.sequence_id] = matched
        self._own_seconds += time.perf_counter() - started

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """The forward and the sampling of a plan took `seconds`."""
        drafting, self._drafting = self._drafting, None
        if drafting is None:
            return
        started = time.perf_counter()
        load, rows = drafting.load, plan.num_tokens
        base = min(self._controller.step_times.predict(load.rows, load.attended), seconds)
        if rows == load.rows or base == 0.0:
            base = seconds
        self._count_costs(drafting, base / load.rows, (seconds - base) / max(rows - load.rows, 1))
        attended = sum(item.attended for item in plan.scheduled)
        self._controller.ran(rows, attended, seconds)
        self._step_seconds += seconds + sum(drafting.draft_seconds.values())
        self._own_seconds += time.perf_counter() - started

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
        if self._drafting is not None:
            self._drafting.ended.append(followed)
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
        if sequence.sequence_id not in self._followed:
            kinds = {
                d.name: Kind.of(sequence, d.name) for d in self._drafters if d.serves(sequence)
            }
            self._followed[sequence.sequence_id] = _Followed(kinds)
        return Candidate(sequence, min(left, MAX_DRAFT_TOKENS), hidden)

    def _learned_from(self, drafting: tuple[str, ...]) -> frozenset[str]:
        """By turns, some of the sequences with a draft: a large batch teaches enough without all."""
        every = -(-len(drafting) // _LEARNED_FROM) or 1
        self._turn += 1
        return frozenset(drafting[self._turn % every :: every])

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
        return replace(item, num_tokens=num_tokens, draft=draft)

    def _count_costs(self, drafting: _Drafting, decode: float, verify: float) -> None:
        """Spread a step's seconds over its sequences. decode: of one sequence; verify: of one
        drafted token."""
        asked = len(drafting.candidates)
        shares = {n: seconds / asked for n, seconds in drafting.draft_seconds.items() if seconds}
        for candidate, followed in zip(drafting.candidates, drafting.followed, strict=True):
            sequence_id = candidate.sequence.sequence_id
            followed.steps += 1
            for drafter, seconds in shares.items():
                if drafter in followed.kinds:
                    spent = followed.draft_seconds.get(drafter, 0.0)
                    followed.draft_seconds[drafter] = spent + seconds
            matched = drafting.matched.get(sequence_id)
            if matched is None:
                continue
            guess = drafting.chosen[sequence_id]
            followed.drafted_steps[guess.drafter] = followed.drafted_steps.get(guess.drafter, 0) + 1
            draft, length = shares.get(guess.drafter, 0.0), len(guess.proposal.tokens)
            line = self._ledger[followed.kinds[guess.drafter]]
            rejected = (length - matched) / length * (draft + length * verify)
            line.cost(length * verify, decode, rejected)
        for followed in drafting.ended:
            followed.enter(self._ledger)


_NOTHING = DraftTotals()


def _load(plan: StepPlan, token_budget: int) -> Load:
    attended = sum(item.attended for item in plan.scheduled)
    return Load(len(plan.scheduled), attended, token_budget - plan.num_tokens)


def _matched(draft: Seq[int], tokens: Seq[SampledToken]) -> int:
    """How many leading tokens of the draft came out."""
    matched = 0
    for drafted, token in zip(draft, tokens, strict=False):
        if drafted != token.token_id:
            break
        matched += 1
    return matched
