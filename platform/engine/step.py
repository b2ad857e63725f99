"""The engine: every sequence from its arrival to its last token, one step at a time.

A step is schedule, run, commit, events. The engine knows nothing of sockets or clients: commands
are method calls between steps, and what happened comes back as events.
"""

import logging
import time

import msgspec

from polyloom.adapters.errors import AdapterError, AdapterTooLargeError, CorruptAdapterError
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.residency import Residency
from polyloom.kvcache.errors import KVCacheError
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.kvcache.manager import KVCacheManager
from polyloom.platform.engine.admission import INVALID_ADAPTER, INVALID_REQUEST, Admission
from polyloom.platform.engine.counters import EngineCounters
from polyloom.platform.engine.draft_heads.heads import DraftHeads
from polyloom.platform.engine.errors import GrammarError, IntegrityError, SamplingError
from polyloom.platform.engine.messages import (
    AdapterResidency,
    CacheReport,
    Capability,
    Event,
    Finished,
    FinishReason,
    Invalidate,
    Refused,
    Snapshot,
    SpeculationReport,
    Status,
    Timings,
    Tokens,
)
from polyloom.platform.engine.prefix import EnginePrefixCache
from polyloom.platform.engine.reading import RowResult
from polyloom.platform.engine.runner import ModelRunner
from polyloom.platform.engine.speculation.speculator import Speculator
from polyloom.platform.engine.structured.sequences import SequenceGrammars
from polyloom.routing.grammar import Vocabulary
from polyloom.routing.request import GenerationRequest
from polyloom.routing.scheduler.batch import ScheduledSequence, StepPlan
from polyloom.routing.scheduler.batcher import Batcher
from polyloom.routing.scheduler.errors import (
    DuplicateSequenceError,
    NeverFitsError,
    QueueFullError,
)
from polyloom.routing.scheduler.sequence import Sequence

logger = logging.getLogger("polyloom.engine")

QUEUE_RETRY_SECONDS = 1.0
MAX_FAILED_STEPS = 3  # in a row; the process is better started anew then


class Engine:
    """Queue, scheduler, cache, adapters and model of one base; single-threaded."""

    def __init__(
        self,
        admission: Admission,
        batcher: Batcher,
        runner: ModelRunner,
        blocks: KVCacheManager,
        prefix_cache: EnginePrefixCache,
        grammars: SequenceGrammars,
        speculator: Speculator,
        pages: AdapterPages,
        residency: Residency,
        draft_heads: DraftHeads,
        capabilities: Capabilities,
    ) -> None:
        self.max_model_len = batcher.config.max_model_len
        self.counters = EngineCounters()
        self._admission = admission
        self._batcher = batcher
        self._runner = runner
        self._blocks = blocks
        self._prefix_cache = prefix_cache
        self._grammars = grammars
        self._speculator = speculator
        self._pages = pages
        self._residency = residency
        self._draft_heads = draft_heads
        self._capabilities = capabilities
        self._draining = False
        self._failed_in_a_row = 0

    @property
    def has_work(self) -> bool:
        """Some sequence waits or runs."""
        return self._batcher.num_running + self._batcher.num_waiting > 0

    @property
    def broken(self) -> bool:
        """Steps keep failing as a whole."""
        return self._failed_in_a_row >= MAX_FAILED_STEPS

    def submit(self, request: GenerationRequest) -> Refused | None:
        """Queue a sequence, or say why not."""
        if self._draining:
            message = "the engine is shutting down"
            return Refused(request.sequence_id, "engine_unavailable", message, QUEUE_RETRY_SECONDS)
        refusal = self._admission.check(
            request, self._residency.quarantined
        ) or self._prefix_cache.refusal(request)
        if refusal is not None:
            return refusal
        sequence_id = request.sequence_id
        try:
            sequence = self._batcher.add(request, time.monotonic())
        except NeverFitsError as error:
            return Refused(sequence_id, "context_length_exceeded", str(error))
        except DuplicateSequenceError as error:
            return Refused(sequence_id, INVALID_REQUEST, str(error))
        except QueueFullError as error:
            return Refused(sequence_id, "queue_full", str(error), QUEUE_RETRY_SECONDS)
        self._prefix_cache.open(request)
        self._grammars.open(sequence)
        return None

    def abort(self, sequence_id: str) -> Finished | None:
        """End a sequence now; None if it has ended already."""
        sequence = self._batcher.get(sequence_id)
        return None if sequence is None else self._finish(sequence, "abort")

    def expect(self, vocabulary: Vocabulary) -> None:
        """Be ready for grammars on this vocabulary; called before the first sequence."""
        self._grammars.expect(vocabulary)

    def retire(self, adapter_digest: str) -> None:
        """Unload a revision and its draft heads once no sequence holds them; what it computed is
        reused no more. Given a draft head's digest, unload that."""
        self._residency.retire(adapter_digest)
        self._draft_heads.retire(adapter_digest)
        self.invalidate(Invalidate(cause="revision_retired", adapter_digest=adapter_digest))

    def invalidate(self, command: Invalidate) -> None:
        """Make cached blocks unreachable; running sequences go on with what they have."""
        self._prefix_cache.invalidate(command)

    def release_prefix(self, hold: str) -> None:
        """Let the blocks held under this id be evicted."""
        self._prefix_cache.release(hold)

    def cache_report(self) -> CacheReport:
        """What the prefix cache did and holds."""
        return self._prefix_cache.report()

    def speculation_report(self) -> SpeculationReport:
        """What drafts brought and cost."""
        return self._speculator.report()

    def drain(self) -> None:
        """Take no new sequences."""
        self._draining = True

    def step(self) -> list[Event]:
        """Run what the scheduler chooses; events in the order in which they happened.

        An empty list from an engine that has work means that it waits for adapters to load.
        """
        started = time.monotonic()
        self._residency.poll()
        events: list[Event] = [
            self._finish(sequence, "deadline") for sequence in self._batcher.overdue(time.time())
        ]
        events += [self._not_sampled(sequence, error) for sequence, error in self._grammars.poll()]
        plan = self._batcher.plan(started)
        events += [self._adapter_failed(f.sequence, f.error) for f in plan.failed]
        if plan.scheduled:
            plan = self._speculator.extend(plan)
            events += self._run(plan)
            self._ran(plan, time.monotonic() - started)
        return events

    def settle(self) -> None:
        """Let loads and retirements that ended while nothing ran take effect."""
        self._residency.poll()

    def status(self) -> Status:
        """Counters and gauges of this moment."""
        counters, batcher = self.counters, self._batcher
        return Status(
            time=time.time(),
            steps=counters.steps,
            running=batcher.num_running,
            waiting=batcher.num_waiting,
            queue_limit=batcher.config.queue_limit,
            blocks_free=self._blocks.num_free_blocks,
            blocks_total=self._blocks.num_blocks,
            pages_free=self._pages.pages_free(),
            pages_total=self._pages.pages_total(),
            resident_adapters=sum(a.state == "resident" for a in self._residency.snapshot()),
            step_seconds_total=counters.step_seconds,
            prompt_tokens_total=counters.prompt_tokens,
            generated_tokens_total=counters.generated_tokens,
            preemptions_total=batcher.preemptions_total,
            pauses_total=batcher.pauses_total,
            chunk_tokens=batcher.chunks.size,
            chunks_total=batcher.chunks.chunks_total,
            chunk_changes_total=batcher.chunks.changes_total,
            chunk_overhead_seconds_total=batcher.chunks.overhead_seconds,
            draining=self._draining,
            quarantined=self._residency.quarantined,
        )

    def snapshot(self) -> Snapshot:
        """Everything held at this moment."""
        return Snapshot(
            status=self.status(),
            sequences=self._batcher.sequence_ids,
            adapters=tuple(
                msgspec.convert(
                    {
                        "digest": a.digest,
                        "state": a.state,
                        "pinned_by": a.pinned_by,
                        "pages": a.pages,
                        "bytes": a.num_bytes,
                        "requests": a.requests,
                    },
                    AdapterResidency,
                )
                for a in self._residency.snapshot()
            ),
            capabilities=self.capabilities(),
        )

    def capabilities(self) -> tuple[Capability, ...]:
        """Every op's implementation and what it did."""
        return tuple(
            Capability(
                ledger.name,
                ledger.implementation,
                ledger.engaged,
                dict(ledger.fallbacks),
                ledger.why,
                ledger.kernels,
                ledger.buckets,
                ledger.seconds,
            )
            for ledger in self._capabilities.ledgers()
        )

    def check_idle(self) -> None:
        """Everything is accounted for while nothing runs.

        Raises:
            IntegrityError: blocks or pins are held although no sequence exists.
        """
        try:
            self._blocks.check_idle()
            self._residency.check()
            self._draft_heads.check()
        except (KVCacheError, AssertionError) as error:
            raise IntegrityError(f"while idle: {error}") from error
        pinned = [a.digest for a in self._residency.snapshot() if a.pinned_by]
        if pinned:
            raise IntegrityError(f"while idle: pins are held on {pinned}")

    def close(self) -> None:
        """Stop the threads that load adapters and heads and compile grammars."""
        self._residency.close()
        self._draft_heads.close()
        self._grammars.stop()

    def _run(self, plan: StepPlan) -> list[Event]:
        started = time.monotonic()
        try:
            results = self._runner.run(plan)
        except Exception as error:  # whatever the device raises: nothing else can be told apart
            logger.exception("a step of %d tokens failed", plan.num_tokens)
            self._failed_in_a_row += 1
            message = f"the step failed: {type(error).__name__}: {error}"
            return [
                self._finish(sequence, "error", error_code="engine_unavailable", error=message)
                for sequence in self._batcher.running()
            ]
        self._failed_in_a_row = 0
        for item, result in zip(plan.scheduled, results, strict=True):
            self._take(item, result)
        self._batcher.commit(plan)
        self._speculator.ran(plan, results, time.monotonic() - started)
        events: list[Event] = []
        for item, result in zip(plan.scheduled, results, strict=True):
            events += self._advance(item, result)
        return events

    def _ran(self, plan: StepPlan, seconds: float) -> None:
        """Count a step, and what a prompt's token costs if it ran mostly those."""
        prompt_tokens = self.counters.ran(plan, seconds)
        self._batcher.ran(plan, seconds)
        if 2 * prompt_tokens > plan.num_tokens:
            self._prefix_cache.prefilled(plan.num_tokens, seconds)

    def _take(self, item: ScheduledSequence, result: RowResult) -> None:
        """Let the tokens that came out be the sequence's."""
        sequence, sampled = item.sequence, result.sampled
        if sampled and sequence.first_token_at is None:
            sequence.first_token_at = time.monotonic()
        self.counters.generated_tokens += len(sampled)
        sequence.tokens += [token.token_id for token in sampled]

    def _advance(self, item: ScheduledSequence, result: RowResult) -> list[Event]:
        """What one sequence's result means for it."""
        sequence, sampled, stop_token = item.sequence, result.sampled, None
        sequence.prompt_logprobs_sent += len(result.prompt_logprobs)
        if sampled and sampled[-1].token_id in sequence.request.sampling.stop_token_ids:
            stop_token, sampled = sampled[-1].token_id, sampled[:-1]
        events: list[Event] = []
        if sampled or result.prompt_logprobs:
            token_ids = tuple(token.token_id for token in sampled)
            logprobs = tuple(token.logprob for token in sampled if token.logprob is not None)
            events.append(Tokens(sequence.sequence_id, token_ids, logprobs, result.prompt_logprobs))
        if result.error is not None:
            events.append(self._not_sampled(sequence, result.error))
        elif stop_token is not None:
            events.append(self._finish(sequence, "stop", stop_token=stop_token))
        elif self._grammars.ended(sequence.sequence_id):
            events.append(self._finish(sequence, "stop"))
        elif sequence.output_len == sequence.request.sampling.max_tokens and item.completes:
            events.append(self._finish(sequence, "length"))
        return events

    def _not_sampled(self, sequence: Sequence, error: SamplingError) -> Finished:
        code = "invalid_schema" if isinstance(error, GrammarError) else "sampling_failed"
        return self._finish(sequence, "error", error_code=code, error=str(error))

    def _adapter_failed(self, sequence: Sequence, error: AdapterError) -> Finished:
        codes = {CorruptAdapterError: "adapter_corrupt", AdapterTooLargeError: INVALID_ADAPTER}
        code = codes.get(type(error), "adapter_unavailable")
        return self._finished(sequence, "error", error_code=code, error=str(error))

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        error_code: str | None = None,
        error: str | None = None,
    ) -> Finished:
        """End a sequence: all that it held is free on return."""
        self._batcher.finish(sequence)
        return self._finished(
            sequence, reason, stop_token=stop_token, error_code=error_code, error=error
        )

    def _finished(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        error_code: str | None = None,
        error: str | None = None,
    ) -> Finished:
        now, arrival, first = time.monotonic(), sequence.arrival, sequence.first_token_at
        outcome = self._prefix_cache.close(sequence.sequence_id)
        drafts = self._speculator.close(sequence.sequence_id)
        self._grammars.close(sequence.sequence_id)
        return Finished(
            sequence_id=sequence.sequence_id,
            reason=reason,
            prompt_tokens=sequence.prompt_len,
            completion_tokens=sequence.output_len,
            timings=Timings(
                queued=(now if sequence.admitted is None else sequence.admitted) - arrival,
                first_token=None if first is None else first - arrival,
                finished=now - arrival,
                adapter_load=sequence.adapter_load,
                preemptions=sequence.preemptions,
            ),
            cached_tokens=0 if outcome is None else outcome.cached,
            stop_token=stop_token,
            error_code=error_code,
            error=error,
            cache=outcome,
            accepted_tokens=drafts.accepted,
            rejected_tokens=drafts.rejected,
        )
