"""An upload on its way to a ready revision."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from polyloom.adapters.artifact import ArtifactLimits, Staging
from polyloom.adapters.base_layout import BaseLayout
from polyloom.adapters.errors import InvalidAdapterError
from polyloom.adapters.validation import ValidatedAdapter, ValidationLimits, validate
from polyloom.adapters.weights import BaseWeights
from polyloom.platform.errors import FidelityFailed
from polyloom.platform.generation.prompts import shipped_template
from polyloom.platform.generation.template_jobs import TemplateFault, TemplateJob
from polyloom.platform.generation.template_workers import TemplateWorkers
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.generation.tokenizers import TextTokenizer, TokenizerUnusable
from polyloom.platform.services.adapters import AdapterRegistry
from polyloom.platform.services.blobs import BlobStore
from polyloom.platform.services.checking import RevisionChecker
from polyloom.platform.services.promotion import Promotion
from polyloom.platform.services.views import (
    BegunRevision,
    RevisionContent,
    RevisionView,
    TenantView,
)
from polyloom.platform.turns import Turns

CHECK_SECONDS = 600.0
"""How long a client that asked to wait is made to."""

Receive = Callable[[Staging], Awaitable[None]]


@dataclass(frozen=True)
class ServedBase:
    """The base that uploads are made for. format: its own tokenizer and template."""

    layout: BaseLayout
    weights: BaseWeights
    folder: Path
    format: ChatTemplate


class Onboarding:
    """Receives, validates and records uploads; their checks run elsewhere."""

    def __init__(
        self,
        *,
        registry: AdapterRegistry,
        checker: RevisionChecker,
        promotion: Promotion,
        blobs: BlobStore,
        base: ServedBase,
        templates: TemplateWorkers,
        artifact_limits: ArtifactLimits,
        validation_limits: ValidationLimits,
    ) -> None:
        self._registry = registry
        self._checker = checker
        self._promotion = promotion
        self._blobs = blobs
        self._base = base
        self._templates = templates
        self._artifact_limits = artifact_limits
        self._validation_limits = validation_limits
        # One upload at a time reads tensors: validation is bound by memory, not by waiting.
        self._validating = asyncio.Lock()
        self._turns = Turns()

    async def upload(
        self,
        tenant: TenantView,
        adapter: str,
        receive: Receive,
        *,
        author: str,
        promote: str | None,
    ) -> BegunRevision:
        """Receive the body, check it whole and record it as `checking`. Content that is a ready
        revision already is promoted at once.

        Raises InvalidAdapterError or TooLargeError (nothing is recorded), InvalidRequest (names),
        QuotaExceeded, GateFailed (for content that is ready already), or QueueFull or
        EngineUnavailable when its template or a gate could not be checked now.
        """
        with self._blobs.staging() as parent, Staging(parent, self._artifact_limits) as staging:
            await receive(staging)
            content = await self._content(tenant, staging.folder)
            await self._check_template(tenant, staging.folder)
            begun = await self._registry.begin_revision(
                tenant, adapter, self._base.layout.digest, content, author=author, promote=promote
            )
        self._checker.wake()
        if promote is not None and begun.revision.state == "ready":
            await self._promotion.move(
                tenant, adapter, promote, begun.revision.number, author=author
            )
        return begun

    async def settled(self, revision: RevisionView) -> RevisionView:
        """The revision once its checks are over.

        Raises FidelityFailed with the verdict when it did not become ready, DeadlineExceeded.
        """
        settled = await self._checker.settled(revision, CHECK_SECONDS)
        if settled.state == "failed":
            reason = settled.failure or "the check failed"
            raise FidelityFailed(f"{settled.label} is failed: {reason}")
        return settled

    async def _content(self, tenant: TenantView, folder: Path) -> RevisionContent:
        async with self._turns.of(tenant.slug), self._validating:
            validated = await asyncio.to_thread(
                validate,
                folder,
                self._base.layout,
                self._base.weights,
                self._validation_limits,
            )
            template_digest = await asyncio.to_thread(self._template_digest, folder, validated)
        return RevisionContent(
            digest=validated.digest,
            folder=str(folder),
            bytes=validated.num_bytes,
            rank=validated.rank,
            targets=validated.target_modules,
            template_digest=template_digest,
            ships_tokenizer=validated.has_tokenizer,
        )

    async def _check_template(self, tenant: TenantView, folder: Path) -> None:
        """Compile the template that would be served, in a worker: compiling folds constants, which
        may take any time and memory."""
        template = await asyncio.to_thread(shipped_template, folder)
        if template is None:
            return
        try:
            await self._templates.run(tenant.slug, TemplateJob(template))
        except TemplateFault as fault:
            raise InvalidAdapterError("chat_template", f"cannot be served: {fault}") from fault

    def _shipped_tokenizer(self, folder: Path) -> TextTokenizer:
        """Raises InvalidAdapterError unless requests can be served by it."""
        try:
            tokenizer = TextTokenizer(folder, like=self._base.format.tokenizer)
        except TokenizerUnusable as error:
            raise InvalidAdapterError("tokenizer.json", f"cannot be served: {error}") from error
        rows = self._base.layout.vocab_size
        if tokenizer.vocabulary_size > rows or not all(0 <= i < rows for i in tokenizer.eos_ids):
            raise InvalidAdapterError(
                "tokenizer_config.json", f"names tokens beyond the base's {rows}"
            )
        return tokenizer

    def _template_digest(self, folder: Path, validated: ValidatedAdapter) -> str | None:
        """Digest of the revision's own prompt format; None when it is the base's."""
        if not (validated.has_template or validated.has_tokenizer):
            return None
        base = self._base.format
        tokenizer = self._shipped_tokenizer(folder) if validated.has_tokenizer else base.tokenizer
        template = shipped_template(folder)
        if template is None:
            template = shipped_template(self._base.folder)
        return ChatTemplate(tokenizer, template).digest
