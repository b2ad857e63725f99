"""Continuous batching: what runs in the next step, and who waits.

A step takes the decodes of all running sequences first, then chunks of prefills, in the order in
which tenants are owed tokens, as many as the decodes' pace allows. A sequence takes the blocks of
all tokens it has when it is admitted, and one more block whenever it grows into it; when none is
free, a running sequence gives its own back and is recomputed later from its prompt and what it has
generated.

Where as many run as may, a sequence of a tenant with less than its share takes the turn of one of a
tenant with more. That one is paused: it keeps its blocks until somebody needs them, and goes on
where it was.

How long a sequence waits is bounded. The first of a tenant that holds less than its share is
admitted by the next `plan`, if its adapter is there and blocks are free or held by tenants with more.
One that finds no blocks is overtaken for `block_patience` seconds at most; then those that overtook
it give theirs back as soon as that suffices: it waits only for sequences older than itself.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

from polyloom.adapters.residency import ResidencyState
from polyloom.kvcache.errors import OutOfBlocksError
from polyloom.routing.request import GenerationRequest
from polyloom.routing.scheduler.batch import (
    FailedSequence,
    PlanBuilder,
    StepPlan,
    adapter_order,
)
from polyloom.routing.scheduler.chunking import ChunkSizer
from polyloom.routing.scheduler.config import SchedulerConfig
from polyloom.routing.scheduler.errors import DuplicateSequenceError, NeverFitsError
from polyloom.routing.scheduler.ports import AdapterPins, SequenceBlocks
from polyloom.routing.scheduler.sequence import Sequence, SequenceStatus
from polyloom.routing.scheduler.takeover import RunningShares
from polyloom.routing.scheduler.waiting import WaitingQueue
from polyloom.routing.scheduler.waiting_pins import WaitingPins

MOST_AT_ONCE = 8
"""Running sequences that give their blocks to one of a tenant with less than its share."""


class Batcher:
    """Owns every sequence of the engine from `add` to `finish`.

    All calls come from the step loop's thread. Times are monotonic seconds, deadlines unix seconds.
    """

    def __init__(
        self, config: SchedulerConfig, blocks: SequenceBlocks, adapters: AdapterPins
    ) -> None:
        if blocks.blocks_for(config.max_model_len) > blocks.num_blocks:
            raise ValueError(
                f"a sequence of max_model_len {config.max_model_len} tokens does not fit in "
                f"{blocks.num_blocks} blocks"
            )
        self.config = config
        self.preemptions_total = 0
        self.pauses_total = 0
        self.chunks = ChunkSizer(config.token_budget, config.itl_target)
        self._blocks = blocks
        self._adapters = adapters
        self._sequences: dict[str, Sequence] = {}
        self._waiting = WaitingQueue(config.queue_limit, config.token_budget)
        self._pins = WaitingPins(config, adapters)
        self._running: list[Sequence] = []
        self._paused: dict[str, Sequence] = {}  # waiting, with blocks
        self._builder = PlanBuilder()
        self._without_blocks: dict[str, Sequence] = {}  # waiting, and refused blocks
        self._deadlines: list[tuple[float, str]] = []

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def sequence_ids(self) -> tuple[str, ...]:
        return tuple(self._sequences)

    def get(self, sequence_id: str) -> Sequence | None:
        return self._sequences.get(sequence_id)

    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    def add(self, request: GenerationRequest, now: float) -> Sequence:
        """Queue a request.

        Raises:
            NeverFitsError: it could not run even alone.
            QueueFullError: too many wait.
            DuplicateSequenceError: the id is in use.
        """
        if request.sequence_id in self._sequences:
            raise DuplicateSequenceError(request.sequence_id)
        prompt_tokens, max_tokens = len(request.prompt), request.sampling.max_tokens
        if prompt_tokens + max_tokens > self.config.max_model_len:
            raise NeverFitsError(prompt_tokens, max_tokens, self.config.max_model_len)
        sequence = Sequence(request, now)
        self._waiting.append(sequence)
        self._sequences[sequence.sequence_id] = sequence
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.sequence_id))
        return sequence

    def finish(self, sequence: Sequence) -> None:
        """End a sequence, wherever it is; its blocks and its pin are free on return."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
        elif sequence.status is not SequenceStatus.FINISHED:
            self._waiting.remove(sequence)
        if sequence.sequence_id in self._blocks:
            self._blocks.free(sequence.sequence_id)
        self._paused.pop(sequence.sequence_id, None)
        self._without_blocks.pop(sequence.sequence_id, None)
        self._pins.release(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._sequences.pop(sequence.sequence_id, None)

    def overdue(self, unix_time: float) -> list[Sequence]:
        """Sequences whose deadline has passed; the caller finishes them."""
        late = []
        while self._deadlines and self._deadlines[0][0] <= unix_time:
            _, sequence_id = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(sequence_id)
            if sequence is not None:
                late.append(sequence)
        return late

    def plan(self, now: float) -> StepPlan:
        """Choose the next step's tokens; their blocks are reserved on return."""
        self._builder = builder = PlanBuilder()
        running_before = len(self._running)
        self._decodes()
        failed: list[FailedSequence] = []
        prefilling = [sequence for sequence in self._running if not sequence.decoding]
        if prefilling or len(self._waiting):
            builder.budget = self.chunks.prefill_tokens(
                builder.items.values(), prefilling[0].computed if prefilling else 0
            )
        if len(self._running) == running_before:  # else newcomers would take the blocks just freed
            failed = self._prefills(prefilling, now)
        for sequence in prefilling:
            if sequence.status is SequenceStatus.RUNNING:
                builder.add_chunk(sequence)
        items = sorted(builder.items.values(), key=adapter_order)
        return StepPlan(tuple(items), tuple(failed))

    def commit(self, plan: StepPlan) -> None:
        """The plan's tokens are in the cache.

        Of a draft, the verified tokens are the sequence's own already, and the next one after
        them; the rest is taken back. All of it is charged: it ran.
        """
        for item in plan.scheduled:
            sequence = item.sequence
            self._waiting.shares.ran(item)
            sequence.computed += item.num_tokens
            if item.draft:
                self._take_back(sequence, len(sequence.tokens) - 1)
            self._blocks.commit(sequence.sequence_id, sequence.tokens, sequence.computed)

    def _take_back(self, sequence: Sequence, verified: int) -> None:
        """Forget what ran after the first `verified` tokens."""
        if sequence.computed > verified:
            sequence.computed = sequence.charged = verified
            self._blocks.truncate(sequence.sequence_id, verified)

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """The plan's step took `seconds`."""
        self.chunks.ran(plan, seconds)

    def _decodes(self) -> None:
        """One token of every decoding sequence, oldest first."""
        for sequence in tuple(self._running):
            runs = sequence.status is SequenceStatus.RUNNING  # still
            if runs and sequence.decoding and self._grow(sequence):
                self._builder.add_decode(sequence)

    def _grow(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a running sequence; False if it was preempted itself."""
        while not self._reserve(sequence):
            paused = self._paused_youngest_first()
            victim = paused[0] if paused else RunningShares(self._running).to_grow()
            self._take_blocks(victim)
            if victim is sequence:
                return False
        return True

    def _reserve(self, sequence: Sequence) -> bool:
        """Blocks for all tokens the sequence has; False, with nothing taken, if too few are free."""
        try:
            self._blocks.reserve(sequence.sequence_id, len(sequence.tokens))
        except OutOfBlocksError:
            return False
        return True

    def _take_blocks(self, sequence: Sequence) -> None:
        """A sequence gives its blocks back and, if it runs, waits again before its tenant's others."""
        if self._paused.pop(sequence.sequence_id, None) is None:
            self._stop(sequence)
        self._blocks.free(sequence.sequence_id)
        sequence.forget_cache()
        self.preemptions_total += 1

    def _pause(self, sequence: Sequence) -> None:
        """A running sequence waits again; it keeps its blocks until somebody needs them."""
        self._stop(sequence)
        self._paused[sequence.sequence_id] = sequence
        self.pauses_total += 1

    def _stop(self, sequence: Sequence) -> None:
        self._builder.drop(sequence)
        self._running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        self._waiting.put_back(sequence)

    def _paused_youngest_first(self) -> list[Sequence]:
        return sorted(self._paused.values(), key=lambda sequence: -sequence.arrival)

    def _prefills(self, prefilling: list[Sequence], now: float) -> list[FailedSequence]:
        """Chunks of prompts in fair order, admitting while budget, room and blocks last.

        A tenant whose next one cannot be admitted is passed over, and one whose adapter is not
        there yet, or whose prompt a running one has begun to compute. Adapters of those that are due
        next are loaded ahead.
        """
        failed: list[FailedSequence] = []
        awaiting = Counter[str]()
        passed_over: set[str] = set()
        seen: set[str] = set()
        self._pins.begin(now)
        for sequence in chain(self._starved(now), self._waiting.candidates(prefilling)):
            if sequence.sequence_id in seen:
                continue
            if sequence.status is SequenceStatus.RUNNING:
                self._builder.add_chunk(sequence)
                continue
            full = self._builder.budget == 0 or self._waiting.tenants <= passed_over
            if full and len(seen) >= self.config.max_running:
                break
            seen.add(sequence.sequence_id)
            state = self._pins.state(sequence)
            if state is ResidencyState.FAILED:
                failed.append(self._fail(sequence))
            elif (
                state is not ResidencyState.RESIDENT
                or sequence.held
                or full
                or sequence.tenant in passed_over
            ):
                continue
            elif self._awaits(sequence):
                awaiting[sequence.tenant] += 1
                if awaiting[sequence.tenant] >= self.config.max_running:
                    passed_over.add(sequence.tenant)
            elif self._admit(sequence, now):
                self._builder.add_chunk(sequence)
            else:
                passed_over.add(sequence.tenant)
        self._pins.end(self._waiting)
        return failed

    def _starved(self, now: float) -> list[Sequence]:
        """Those that went without blocks for longer than their patience, the oldest first."""
        starved = [s for s in self._without_blocks.values() if self._out_of_patience(s, now)]
        return sorted(starved, key=lambda sequence: sequence.arrival)

    def _awaits(self, sequence: Sequence) -> bool:
        """Whether running sequences are about to compute what it could then share."""
        if sequence.sequence_id in self._blocks:  # it was paused
            return False
        computing = (other.sequence_id for other in self._running if not other.decoding)
        return self._blocks.awaits(
            sequence.sequence_id, sequence.tokens, sequence.reusable, computing
        )

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Let a waiting sequence run, in the place of others where its tenant's share says so."""
        in_turn_of = None
        if len(self._running) >= self.config.max_running:
            in_turn_of = next(self._over_share(sequence), None)
            if in_turn_of is None:
                return False
        if not self._find_blocks(sequence, now):
            return False
        if in_turn_of is not None and in_turn_of.status is SequenceStatus.RUNNING:
            self._pause(in_turn_of)
        self._paused.pop(sequence.sequence_id, None)
        self._waiting.remove(sequence)
        self._insert_running(sequence)
        sequence.status = SequenceStatus.RUNNING
        if sequence.admitted is None:
            sequence.admitted = now
        return True

    def _find_blocks(self, sequence: Sequence, now: float) -> bool:
        """Blocks for all its tokens: free ones, then paused sequences', then running ones'.

        They give theirs only if that suffices; running ones of tenants over their share, and after
        the sequence's patience all that overtook it.
        """
        if self._open(sequence):
            return True
        if sequence.no_blocks_since is None:
            sequence.no_blocks_since = now
            self._without_blocks[sequence.sequence_id] = sequence
        paused = [other for other in self._paused_youngest_first() if other is not sequence]
        over_share = islice(self._over_share(sequence), MOST_AT_ONCE)
        victims = self._enough(sequence, chain(paused, over_share))
        if not victims and self._out_of_patience(sequence, now):
            younger = RunningShares(self._running).younger(sequence)
            victims = self._enough(sequence, chain(paused, younger))
        for victim in victims:
            self._take_blocks(victim)
        return bool(victims) and self._open(sequence)

    def _open(self, sequence: Sequence) -> bool:
        """Give it blocks; those of its prefix that are cached need not run."""
        if sequence.sequence_id in self._blocks:  # it was paused
            found = self._reserve(sequence)
        else:
            try:
                sequence.computed = self._blocks.admit(
                    sequence.sequence_id, sequence.tokens, sequence.reusable
                )
                found = True
            except OutOfBlocksError:
                found = False
        if found:
            sequence.no_blocks_since = None
            self._without_blocks.pop(sequence.sequence_id, None)
        return found

    def _over_share(self, sequence: Sequence) -> Iterator[Sequence]:
        return RunningShares(self._running).over_share(sequence, self._waiting.shares)

    def _enough(self, sequence: Sequence, candidates: Iterator[Sequence]) -> list[Sequence]:
        """As many of `candidates` as hold the blocks that `sequence` lacks; none if all do not."""
        blocks = self._blocks
        held = blocks.blocks_for(sequence.computed) if sequence.sequence_id in blocks else 0
        lacking = blocks.blocks_for(len(sequence.tokens)) - held - blocks.num_free_blocks
        chosen: list[Sequence] = []
        for candidate in candidates:
            chosen.append(candidate)
            lacking -= blocks.blocks_for(len(candidate.tokens))
            if lacking <= 0:
                return chosen
        return []

    def _out_of_patience(self, sequence: Sequence, now: float) -> bool:
        since = sequence.no_blocks_since
        return since is not None and now - since >= self.config.block_patience

    def _insert_running(self, sequence: Sequence) -> None:
        """Keep `_running` oldest first: the last is the one to preempt."""
        place = len(self._running)
        while place > 0 and self._running[place - 1].arrival > sequence.arrival:
            place -= 1
        self._running.insert(place, sequence)

    def _fail(self, sequence: Sequence) -> FailedSequence:
        digest = sequence.adapter_digest
        assert digest is not None  # only sequences with an adapter have a pin that can fail
        error = self._adapters.failure(digest)
        self.finish(sequence)
        return FailedSequence(sequence, error)
