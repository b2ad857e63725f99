"""Builds and owns every object of the server; nothing else creates one that lives as long."""

import asyncio
import logging
import os
import tempfile
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import torch

from polyloom.adapters.artifact import ArtifactLimits
from polyloom.adapters.validation import ValidationLimits
from polyloom.platform import admin_key
from polyloom.platform.coordination.announcements import Announcements
from polyloom.platform.coordination.limits import RateLimits
from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.db import migrate
from polyloom.platform.db.engine import Database
from polyloom.platform.engine.fidelity.client import FidelityValidator
from polyloom.platform.engine.fidelity.messages import FidelitySettings
from polyloom.platform.engine.fleet import EngineFleet
from polyloom.platform.engine.messages import Invalidate
from polyloom.platform.engine.model.layout import base_layout
from polyloom.platform.engine.model.store import BaseModel, pull
from polyloom.platform.engine.model.weights import FusedWeights
from polyloom.platform.engine.pool import EnginePool
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.generation.answer_formats import vocabulary_of
from polyloom.platform.generation.cache_observer import CacheObserver
from polyloom.platform.generation.golden import GoldenRuns
from polyloom.platform.generation.grammar_checks import GrammarChecks
from polyloom.platform.generation.held_prefixes import HoldPlanner
from polyloom.platform.generation.inference import Inference
from polyloom.platform.generation.prompts import PromptFormats, shipped_template
from polyloom.platform.generation.request_plan import ServedModel
from polyloom.platform.generation.template_workers import TemplateWorkers
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.generation.tokenizers import TextTokenizer, TokenizerCache
from polyloom.platform.services.adapters import AdapterRegistry
from polyloom.platform.services.aliases import AliasService
from polyloom.platform.services.audit import AuditService
from polyloom.platform.services.bases import BaseService
from polyloom.platform.services.blob_keeper import BlobKeeper
from polyloom.platform.services.blobs import BlobStore
from polyloom.platform.services.checking import RevisionChecker
from polyloom.platform.services.draft_heads import DraftHeadRegistry
from polyloom.platform.services.engine_presence import EnginePresence
from polyloom.platform.services.engine_watch import EngineWatch
from polyloom.platform.services.gates import GateService
from polyloom.platform.services.head_onboarding import DraftHeadOnboarding
from polyloom.platform.services.invalidations import Invalidations
from polyloom.platform.services.keys import KeyService
from polyloom.platform.services.onboarding import Onboarding, ServedBase
from polyloom.platform.services.prefix_accounts import PrefixAccounts
from polyloom.platform.services.prefix_holds import PrefixHolds
from polyloom.platform.services.prefix_records import PrefixRecords
from polyloom.platform.services.promotion import Promotion
from polyloom.platform.services.retirement import Retirement
from polyloom.platform.services.revision_check import FidelityCheck
from polyloom.platform.services.routes import RouteService
from polyloom.platform.services.shares import ShareService
from polyloom.platform.services.snapshots import SnapshotService
from polyloom.platform.services.tenants import TenantService
from polyloom.platform.services.usage import UsageRecorder, UsageService
from polyloom.platform.settings import GIB, Settings, default_database_url
from polyloom.platform.telemetry.engine import EngineMetrics
from polyloom.platform.telemetry.generation import GenerationMetrics
from polyloom.platform.telemetry.metrics import Metrics
from polyloom.platform.telemetry.prefix_cache import PrefixCacheMetrics
from polyloom.platform.telemetry.speculation import SpeculationMetrics
from polyloom.routing.grammar import Vocabulary
from polyloom.routing.request import CacheOwner

log = logging.getLogger(__name__)

KV_MEMORY = GIB
ADAPTER_MEMORY = GIB // 2
TOKEN_BUDGET = 512
MAX_RUNNING = 64
FIDELITY_MEMORY = 4 * GIB
PROBE_TEXT = "The quick brown fox"


class Assembly:
    """The server's objects; they exist while `running` runs.

    admin_key_file: where the admin key is, None when a setting gave it.
    """

    base: BaseModel
    database: Database
    fleet: EngineFleet
    engine: EnginePool
    metrics: Metrics
    keys: KeyService
    tenants: TenantService
    snapshots: SnapshotService
    registry: AdapterRegistry
    draft_heads: DraftHeadRegistry
    head_onboarding: DraftHeadOnboarding
    aliases: AliasService
    gates: GateService
    routes: RouteService
    promotion: Promotion
    shares: ShareService
    retirement: Retirement
    onboarding: Onboarding
    usage: UsageService
    audit: AuditService
    inference: Inference
    presence: EnginePresence
    invalidations: Invalidations
    prefix_accounts: PrefixAccounts
    holds: PrefixHolds
    server_id: str
    admin_key_file: Path | None = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @asynccontextmanager
    async def running(self) -> AsyncGenerator["Assembly", None]:
        """Start everything in order; end it in the opposite order, whatever happens between.

        Raises EngineStartError, ModelError, TokenizerUnusable, SettingsError, PlatformError or
        OSError when something cannot start.
        """
        settings = self.settings
        settings.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        async with AsyncExitStack() as stack:
            self.base = await asyncio.to_thread(pull, settings.base, settings.data_dir)
            base_format = await asyncio.to_thread(_base_format, self.base.folder)
            await self._open_record(stack)
            await self._start_engine(stack, base_format)
            self.templates = TemplateWorkers()
            stack.push_async_callback(self.templates.close)
            await self._start_registry(stack, base_format)
            await self._start_inference(stack)
            await self._start_checks(stack, base_format)
            await self._start_prefixes(stack)
            yield self
            log.info("ending")

    async def _open_record(self, stack: AsyncExitStack) -> None:
        """Database, live state, and who may call."""
        settings = self.settings
        url = settings.database_url or default_database_url(settings.data_dir)
        if url.startswith("sqlite"):
            await migrate.upgrade(url)
        else:
            await migrate.check(url)
        self.database = Database(url)
        stack.push_async_callback(self.database.close)
        self.live = LiveState(settings.redis_url)
        stack.push_async_callback(self.live.close)
        self.server_id = uuid.uuid4().hex
        self.announcements = Announcements(self.live, self.server_id)
        await self.announcements.start()
        stack.push_async_callback(self.announcements.stop)
        key = settings.admin_key
        if key is None:
            key, self.admin_key_file = admin_key.load_or_create(settings.data_dir)
        self.keys = KeyService(self.database, self.announcements, admin_key=key)
        self.tenants = TenantService(self.database, self.announcements)
        self.audit = AuditService(self.database)
        self.usage = UsageService(self.database)
        self.metrics = Metrics()
        stack.callback(self.metrics.close)

    async def _start_engine(self, stack: AsyncExitStack, base_format: ChatTemplate) -> None:
        vocabulary = vocabulary_of(base_format.tokenizer, self.base.eos_token_ids)
        sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="polyloom-"))
        settings = [
            _engine_settings(
                self.settings, self.base, vocabulary, Path(sockets) / f"engine-{number}"
            )
            for number in range(self.settings.engines)
        ]
        self.fleet = EngineFleet(settings)
        clients = await self.fleet.start()
        stack.push_async_callback(self.fleet.close)
        one = settings[0]
        self.engine = EnginePool(clients, block_size=one.block_size, kv_dtype=one.stored_dtype)

    async def _start_registry(self, stack: AsyncExitStack, base_format: ChatTemplate) -> None:
        """Adapters and their routes."""
        settings, base = self.settings, self.base
        self.blobs = blobs = BlobStore(settings.data_dir)
        self.snapshots = SnapshotService(
            self.database, blobs, self.announcements, served=[base.digest]
        )
        changed = self.snapshots.routes_changed
        self.invalidations = Invalidations(self.database, self.announcements, self.engine)
        await self.invalidations.start()
        await BaseService(self.database, changed, self._empty_cache_of_base).register(
            name=base.name,
            digest=base.digest,
            folder=str(base.folder),
            template_digest=base_format.digest,
            config=(base.folder / "config.json").read_text(),
        )
        self.registry = AdapterRegistry(self.database, blobs, changed)
        self.draft_heads = DraftHeadRegistry(self.database, blobs, self.engine, changed)
        self.aliases = AliasService(self.database, changed)
        self.retirement = Retirement(self.registry, self.snapshots, self.engine, self.invalidations)
        keeper = BlobKeeper(self.database, blobs, self.registry, grace=settings.request_deadline)
        await keeper.start()
        stack.push_async_callback(keeper.stop)
        await self.snapshots.start()
        stack.push_async_callback(self.snapshots.stop)

    async def _start_checks(self, stack: AsyncExitStack, base_format: ChatTemplate) -> None:
        """What is asked of a revision before it is served, and of an alias or a route."""
        settings, base = self.settings, self.base
        self.gates = GateService(self.database, GoldenRuns(self.inference))
        self.routes = RouteService(self.database, self.snapshots, self.gates)
        self.promotion = Promotion(self.aliases, self.gates, self.snapshots, self.tenants)
        self.shares = ShareService(self.database, self.snapshots, self._empty_cache)
        validator = FidelityValidator(
            FidelitySettings(
                model_folder=str(base.folder),
                base_name=base.name,
                base_digest=base.digest,
                threads=_threads(),
                memory_bytes=FIDELITY_MEMORY,
            )
        )
        stack.push_async_callback(validator.close)
        check = FidelityCheck(
            validator,
            self.engine,
            base_digest=base.digest,
            template_digest=base_format.digest,
            probe=tuple(base_format.tokenizer.encode_now(PROBE_TEXT, special_tokens=True)),
        )
        checker = RevisionChecker(
            self.registry, check, [base.digest], promotion=self.promotion.verdict
        )
        await checker.start()
        stack.push_async_callback(checker.stop)
        layout = base_layout(
            base.config, name=base.name, digest=base.digest, other_names=base.names
        )
        weights = FusedWeights(base.folder, base.config, torch.float32)
        limits = ArtifactLimits(upload_bytes=settings.upload_limit)
        self.head_onboarding = DraftHeadOnboarding(
            registry=self.draft_heads,
            blobs=self.blobs,
            layout=layout,
            limits=limits,
            max_rank=settings.max_rank,
        )
        self.onboarding = Onboarding(
            registry=self.registry,
            checker=checker,
            promotion=self.promotion,
            blobs=self.blobs,
            base=ServedBase(layout, weights, base.folder, base_format),
            templates=self.templates,
            artifact_limits=limits,
            validation_limits=ValidationLimits(max_rank=settings.max_rank),
        )

    async def _start_inference(self, stack: AsyncExitStack) -> None:
        recorder = UsageRecorder(self.database)
        await recorder.start()
        stack.push_async_callback(recorder.stop)
        rate_limits = RateLimits(self.live)
        await rate_limits.start()
        stack.push_async_callback(rate_limits.stop)
        self.presence = EnginePresence(self.engine, self.live, self.server_id)
        self.presence.start()
        stack.push_async_callback(self.presence.stop)
        watch = EngineWatch(self.engine, self.retirement)
        watch.start()
        stack.push_async_callback(watch.stop)
        meter = self.metrics.meter
        self.engine_metrics = EngineMetrics(meter, self.engine.engines, watch.capabilities)
        self.speculation_metrics = SpeculationMetrics(meter, watch.speculation)
        grammars = GrammarChecks()
        stack.callback(grammars.close)
        self.inference = Inference(
            engine=self.engine,
            routes=lambda: self.snapshots.current,
            served=self._served,
            formats=PromptFormats(TokenizerCache(), self.base.folder, self.templates),
            grammars=grammars,
            rate_limits=rate_limits,
            usage=recorder,
            metrics=GenerationMetrics(meter),
            cache=CacheObserver(PrefixCacheMetrics(meter, lambda: self.presence.reports)),
            announcements=self.announcements,
            deadline=self.settings.request_deadline,
            drafts=self.settings.drafts,
        )

    async def _empty_cache_of_base(self, command: Invalidate) -> None:
        await self.invalidations.invalidate(command, author="server")

    async def _empty_cache(self, owner: CacheOwner, author: str) -> None:
        command = Invalidate(cause="share_revoked", owner=owner)
        await self.invalidations.invalidate(command, author=author)

    async def _start_prefixes(self, stack: AsyncExitStack) -> None:
        """The accounts of prefix caches, and what is held in them."""
        self.prefix_accounts = PrefixAccounts(
            self.engine, PrefixRecords(self.database), self.invalidations, self.snapshots
        )
        self.prefix_accounts.start()
        stack.push_async_callback(self.prefix_accounts.stop)
        self.holds = PrefixHolds(
            self.database,
            self.engine,
            HoldPlanner(self.inference, self.engine.block_size),
            caching=self.settings.prefix_cache,
        )
        self.holds.start()
        stack.push_async_callback(self.holds.stop)

    def _served(self) -> ServedModel | None:
        welcome = self.engine.welcome
        if welcome is None:
            return None
        return ServedModel(
            welcome.max_model_len, welcome.max_prompt_tokens, self.base.eos_token_ids
        )


def _base_format(folder: Path) -> ChatTemplate:
    return ChatTemplate(TextTokenizer(folder), shipped_template(folder))


def _threads() -> int:
    return len(os.sched_getaffinity(0))


def _engine_settings(
    settings: Settings, base: BaseModel, vocabulary: Vocabulary, socket: Path
) -> EngineSettings:
    """One engine's settings on a CPU, where no other default was chosen."""
    return EngineSettings(
        model_folder=str(base.folder),
        base_name=base.name,
        base_digest=base.digest,
        address=f"ipc://{socket}",
        kv_memory=settings.kv_memory or KV_MEMORY,
        adapter_memory=settings.adapter_memory or ADAPTER_MEMORY,
        threads=max(1, _threads() // settings.engines),
        device="cuda" if settings.device == "cuda" else "cpu",
        dtype="float32" if settings.dtype == "float32" else "bfloat16",
        kv_dtype=settings.kv_dtype,
        block_size=settings.block_size,
        token_budget=settings.token_budget or TOKEN_BUDGET,
        max_running=settings.max_running or MAX_RUNNING,
        queue_limit=settings.queue_limit,
        max_model_len=settings.max_model_len,
        max_rank=settings.max_rank,
        itl_target=settings.itl_target,
        vocabulary=vocabulary,
        prefix_cache=settings.prefix_cache,
        draft_model=None if settings.draft_model is None else str(settings.draft_model),
    )
