"""From an authenticated, parsed request to a running generation, and its accounts at the end."""

import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from polyloom.platform.coordination.announcements import Announcements, CancelRequest
from polyloom.platform.coordination.limits import RateLimits
from polyloom.platform.errors import EngineUnavailable
from polyloom.platform.generation.answer_formats import AnswerFormat
from polyloom.platform.generation.cache_observer import CacheObserver
from polyloom.platform.generation.grammar_checks import GrammarChecks
from polyloom.platform.generation.prompts import PromptFormats
from polyloom.platform.generation.request_plan import ServedModel
from polyloom.platform.generation.run import ChoiceDelta, GenerationRun, RunPlan, SequenceEngine
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.services.usage import UsageRecorder
from polyloom.platform.services.views import TenantView, UsageRecord
from polyloom.platform.telemetry.generation import GenerationMetrics
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.grammar import Grammar
from polyloom.routing.request import CacheScope, GenerationRequest
from polyloom.routing.resolver import Resolution, resolve
from polyloom.routing.sampling_params import SamplingParams
from polyloom.routing.snapshot import RouteSnapshot


@dataclass(frozen=True)
class Target:
    """Who asks for what: the resolved model with its prompt format, and what the engine takes.

    cache: whose prefix cache the prompts may use.
    conversation: requests of one are started in the order of their arrival.
    drafts, domain: how its tokens are drafted, and what that is measured under.
    """

    request_id: str
    tenant: TenantView
    key_id: int | None
    model: str
    endpoint: str
    resolution: Resolution
    format: ChatTemplate
    served: ServedModel
    cache: CacheScope
    conversation: str | None = None
    drafts: DraftPolicy = "adaptive"
    domain: str = ""


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt, the parameters of its first choice, and what its answers match.

    tool_schema_digest: of the tools that it describes.
    """

    ids: tuple[int, ...]
    sampling: SamplingParams
    grammar: Grammar | None = None
    tool_schema_digest: str | None = None


class InferenceCall:
    """One request on its way. Iterate `deltas` once; the accounts are written when it ends."""

    def __init__(self, inference: "Inference", target: Target, plan: RunPlan) -> None:
        self.target = target
        self.plan = plan
        self.created = int(time.time())
        self.run = GenerationRun(inference.engine, plan)
        self._inference = inference
        self._started = time.monotonic()

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the request, each prompt once."""
        return sum(len(s.prompt) for s in self.plan.sequences[:: self.plan.choices_per_prompt])

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Admit, run, and account for the request. Raises RateLimited, QuotaExceeded, and what
        `GenerationRun.deltas` raises."""
        inference, tenant = self._inference, self.target.tenant
        failure: BaseException | None = None
        async with inference.rate_limits.admit(
            tenant, prompt_tokens=self.prompt_tokens
        ) as admission:
            inference.running[self.target.request_id] = self
            try:
                async with contextlib.aclosing(self.run.deltas()) as deltas:
                    async for delta in deltas:
                        yield delta
            except BaseException as error:
                failure = error
                raise
            finally:
                del inference.running[self.target.request_id]
                self._account(failure)
                await admission.charge(self.run.totals.completion_tokens)

    def _account(self, failure: BaseException | None) -> None:
        record = self._usage(failure)
        self._inference.usage.record(record)
        self._inference.metrics.record(tenant=self.target.tenant.slug, usage=record)
        self._inference.cache.record(self.target, self.run.totals.cache, record.created_at)

    def _usage(self, failure: BaseException | None) -> UsageRecord:
        target, totals = self.target, self.run.totals
        later_tokens = totals.completion_tokens - len(self.plan.sequences)
        itl = None
        if totals.first_token is not None and later_tokens > 0:
            itl = (totals.finished - totals.first_token) * len(self.plan.sequences) / later_tokens
        return UsageRecord(
            request_id=target.request_id,
            tenant_id=target.tenant.id,
            key_id=target.key_id,
            endpoint=target.endpoint,
            model=target.model,
            adapter=target.resolution.adapter_name,
            revision=target.resolution.revision,
            adapter_digest=target.resolution.combination.adapter_digest,
            fingerprint=target.resolution.combination.fingerprint,
            finish_reason=_finish_reason(self.run, failure),
            prompt_tokens=totals.prompt_tokens,
            completion_tokens=totals.completion_tokens,
            cached_tokens=totals.cached_tokens,
            accepted_draft_tokens=totals.accepted_tokens,
            rejected_draft_tokens=totals.rejected_tokens,
            queue_time=totals.queue_time,
            ttft=totals.first_token,
            itl=itl,
            duration=time.monotonic() - self._started,
            created_at=datetime.fromtimestamp(self.created, UTC),
        )


def _conversation(session: str) -> str:
    """The session in a bounded form, whatever the client calls it."""
    return hashlib.sha256(session.encode()).hexdigest()[:32]


def _finish_reason(run: GenerationRun, failure: BaseException | None) -> str:
    if isinstance(failure, Exception):
        return "error"
    if failure is not None:  # GeneratorExit, CancelledError: the client left
        return "cancelled"
    reasons = set(run.totals.finish_reasons)
    return next((r for r in ("cancelled", "length", "stop") if r in reasons), "stop")


class Inference:
    """What the inference endpoints share."""

    def __init__(
        self,
        *,
        engine: SequenceEngine,
        routes: Callable[[], RouteSnapshot],
        served: Callable[[], ServedModel | None],
        formats: PromptFormats,
        grammars: GrammarChecks,
        rate_limits: RateLimits,
        usage: UsageRecorder,
        metrics: GenerationMetrics,
        cache: CacheObserver,
        announcements: Announcements,
        deadline: float,
        drafts: DraftPolicy = "adaptive",
    ) -> None:
        """deadline: seconds from arrival.  drafts: of requests that do not say,
        and whose route does not."""
        self.engine = engine
        self.rate_limits = rate_limits
        self.usage = usage
        self.metrics = metrics
        self.cache = cache
        self.deadline = deadline
        self.running: dict[str, InferenceCall] = {}
        self._routes = routes
        self._served = served
        self._formats = formats
        self._grammars = grammars
        self._announcements = announcements
        self._drafts = drafts
        announcements.subscribe(CancelRequest, self._cancel_here)

    async def target(
        self,
        tenant: TenantView,
        key_id: int | None,
        model: str,
        endpoint: str,
        *,
        session: str | None = None,
        salt: str | None = None,
    ) -> Target:
        """Resolve `model` for `tenant`.

        session: its requests stay on one target of a route; None: this one is on its own.
        salt: of the cache's namespace.  Raises RoutingError, EngineUnavailable.
        """
        request_id = "req_" + uuid.uuid4().hex
        resolution = resolve(self._routes(), tenant.slug, model, session or request_id)
        return await self.target_of(
            resolution,
            tenant,
            key_id,
            model,
            endpoint,
            request_id=request_id,
            session=session,
            salt=salt,
        )

    async def target_of(
        self,
        resolution: Resolution,
        tenant: TenantView,
        key_id: int | None,
        model: str,
        endpoint: str,
        *,
        request_id: str,
        session: str | None = None,
        salt: str | None = None,
    ) -> Target:
        """`target` for what is resolved already. Raises EngineUnavailable."""
        served = self._served()
        if served is None:
            raise EngineUnavailable("the engine is starting", retry_after=5)
        prompt_format = await self._formats.get(resolution)
        return Target(
            request_id=request_id,
            tenant=tenant,
            key_id=key_id,
            model=model,
            endpoint=endpoint,
            resolution=resolution,
            format=prompt_format,
            served=served,
            cache=CacheScope(
                owner=resolution.owner,
                tokenizer_digest=prompt_format.tokenizer.digest,
                salt=salt,
            ),
            conversation=None if session is None else _conversation(session),
            drafts=self._drafts if resolution.drafts is None else resolution.drafts,
            domain=model,
        )

    async def grammar(
        self, target: Target, asked: AnswerFormat | None, parts: Sequence[AnswerFormat] = ()
    ) -> Grammar | None:
        """What was asked of an answer as the engine takes it, checked.

        parts: what it was made of, each to be blamed for itself.
        Raises InvalidSchema, InvalidRequest, QueueFull.
        """
        if asked is None:
            return None
        for part in (*parts, asked):
            await self._grammars.check(part)
        return asked.on(target.format.tokenizer, target.served.eos_ids)

    def call(
        self,
        target: Target,
        prompts: list[Prompt],
        choices: int,
        stops: tuple[str, ...],
        echo: tuple[str, ...] = (),
        prompt_only: bool = False,
        shown: frozenset[int] = frozenset(),
    ) -> InferenceCall:
        """`choices` sequences for each prompt, in the order of the answer's choices.

        shown: special tokens that are part of the text.
        """
        deadline = time.time() + self.deadline
        sequences = tuple(
            self._sequence(target, prompt, index * choices + choice, choice, deadline)
            for index, prompt in enumerate(prompts)
            for choice in range(choices)
        )
        tokenizer = target.format.tokenizer
        plan = RunPlan(sequences, tokenizer, stops, choices, echo, prompt_only, shown)
        return InferenceCall(self, target, plan)

    def _sequence(
        self, target: Target, prompt: Prompt, index: int, choice: int, deadline: float
    ) -> GenerationRequest:
        sampling = prompt.sampling
        return GenerationRequest(
            sequence_id=f"{target.request_id}-{index}",
            tenant=target.tenant.slug,
            combination=target.resolution.combination,
            adapter=target.resolution.adapter,
            draft_head=target.resolution.draft_head,
            prompt=prompt.ids,
            sampling=msgspec.structs.replace(sampling, choice=choice),
            deadline=deadline,
            cache=msgspec.structs.replace(
                target.cache, tool_schema_digest=prompt.tool_schema_digest
            ),
            grammar=prompt.grammar,
            drafts=target.drafts,
            domain=target.domain,
            conversation=target.conversation,
            weight=target.tenant.weight,
        )

    async def cancel(self, tenant: TenantView, request_id: str) -> None:
        """End a request of this tenant, in whichever process it runs."""
        await self._announcements.publish(CancelRequest(tenant.slug, request_id))

    async def _cancel_here(self, cancel: CancelRequest) -> None:
        call = self.running.get(cancel.request_id)
        if call is not None and call.target.tenant.slug == cancel.tenant:
            await call.run.cancel()
