"""Judges a new revision: the engine's logits against PEFT's, then a generation through the engine."""

from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from polyloom.adapters.source import AdapterSource
from polyloom.platform.engine.errors import EngineRefusedError, EngineUnavailableError
from polyloom.platform.engine.fidelity.errors import (
    FidelityTimeoutError,
    FidelityWorkerError,
    UncheckableError,
)
from polyloom.platform.engine.fidelity.messages import Verdict
from polyloom.platform.engine.messages import Finished, Tokens
from polyloom.platform.errors import EngineUnavailable
from polyloom.platform.services.views import CheckJob, FidelityVerdict
from polyloom.routing.combination import Combination
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams

PROBE_TOKENS = 4
WORKER_TRIES = 3
"""A worker that dies may have been killed for its memory; one that dies each time is the adapter's
fault."""


class Validator(Protocol):
    """What the check needs of `FidelityValidator`."""

    async def validate(self, source: AdapterSource) -> Verdict:
        """Raises FidelityError."""
        ...


class ProbeEngine(Protocol):
    """What the check needs of `EngineClient`."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Tokens | Finished, None]:
        """Run one sequence. Raises EngineError."""
        ...


class FidelityCheck:
    """`RevisionCheck` of one base."""

    def __init__(
        self,
        validator: Validator,
        engine: ProbeEngine,
        *,
        base_digest: str,
        template_digest: str,
        probe: tuple[int, ...],
    ) -> None:
        """probe: a prompt's token ids."""
        self._validator = validator
        self._engine = engine
        self._base_digest = base_digest
        self._template_digest = template_digest
        self._probe = probe
        self._deaths: Counter[str] = Counter()

    async def __call__(self, job: CheckJob) -> FidelityVerdict:
        """Raises EngineUnavailable when the check must be tried again."""
        try:
            verdict = await self._validator.validate(job.source)
        except (UncheckableError, FidelityTimeoutError) as error:
            return FidelityVerdict(max_logprob_diff=None, failure=str(error))
        except FidelityWorkerError as error:
            return self._died(job.source.digest, error)
        self._deaths.pop(job.source.digest, None)
        difference = verdict.max_logprob_diff
        if not verdict.passed:
            reason = (
                f"the engine's logprobs differ from PEFT's by up to {difference:.2e}; "
                f"the bound is {verdict.bound:.0e}"
            )
            return FidelityVerdict(max_logprob_diff=difference, failure=reason)
        failure = await self._generate(job)
        return FidelityVerdict(max_logprob_diff=difference, failure=failure)

    def _died(self, digest: str, error: FidelityWorkerError) -> FidelityVerdict:
        self._deaths[digest] += 1
        if self._deaths[digest] < WORKER_TRIES:
            raise EngineUnavailable(f"the validator died: {error}") from error
        del self._deaths[digest]
        reason = f"the validator died {WORKER_TRIES} times on this revision: {error}"
        return FidelityVerdict(max_logprob_diff=None, failure=reason)

    async def _generate(self, job: CheckJob) -> str | None:
        """Why the revision cannot generate; None when it did."""
        request = GenerationRequest(
            sequence_id=f"check-{job.revision.id}",
            tenant=job.revision.tenant,
            combination=Combination(
                base_digest=self._base_digest,
                template_digest=self._template_digest,
                adapter_digest=job.source.digest,
            ),
            adapter=job.source,
            prompt=self._probe,
            sampling=SamplingParams(max_tokens=PROBE_TOKENS, seed=0, temperature=0.0),
        )
        try:
            async with aclosing(self._engine.generate(request)) as events:
                async for event in events:
                    if isinstance(event, Finished) and event.reason == "error":
                        return f"the probe generation failed: {event.error}"
        except EngineUnavailableError as error:
            raise EngineUnavailable(str(error)) from error
        except EngineRefusedError as error:
            if error.code == "queue_full":
                raise EngineUnavailable(str(error)) from error
            return f"the probe generation was refused: {error}"
        return None
