"""The services assembled on a database of each kind, with a clock that tests move."""

import hashlib
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from polyloom.platform.coordination.announcements import Announcements
from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.db.engine import Database
from polyloom.platform.engine.messages import Invalidate
from polyloom.platform.generation.golden import GoldenPrompt, GoldenResult
from polyloom.platform.services.adapters import AdapterRegistry
from polyloom.platform.services.aliases import AliasService
from polyloom.platform.services.audit import AuditService
from polyloom.platform.services.bases import BaseService
from polyloom.platform.services.blob_keeper import BlobKeeper
from polyloom.platform.services.blobs import BlobStore
from polyloom.platform.services.gates import GateService
from polyloom.platform.services.keys import KeyService
from polyloom.platform.services.promotion import Promotion
from polyloom.platform.services.routes import RouteService
from polyloom.platform.services.shares import ShareService
from polyloom.platform.services.snapshots import SnapshotService
from polyloom.platform.services.tenants import TenantService
from polyloom.platform.services.views import (
    FidelityVerdict,
    RevisionContent,
    RevisionView,
    TenantLimits,
    TenantView,
)
from polyloom.routing.request import CacheOwner
from polyloom.routing.resolver import Resolution

BASE = "sha256:" + "b" * 64
PASSED = FidelityVerdict(max_logprob_diff=1e-5)


def digest_of(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC).timestamp()

    def __call__(self) -> float:
        return self.now


class GoldenAnswers:
    """Candidates that fail a prompt whose name is their label, and note what they were asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    async def __call__(
        self, tenant: TenantView, candidate: Resolution, prompts: Sequence[GoldenPrompt]
    ) -> tuple[GoldenResult, ...]:
        self.asked.append((candidate.label, tuple(p.name for p in prompts)))
        return tuple(
            GoldenResult(
                name=p.name,
                expected="contains 'yes'" if p.name == candidate.label else None,
                got="no",
            )
            for p in prompts
        )


class Process:
    """One API process's services."""

    def __init__(self, database: Database, folder: Path, live: LiveState, name: str) -> None:
        self.time = Time()
        self.database = database
        self.blobs = BlobStore(folder)
        self.announcements = Announcements(live, name)
        self.snapshots = SnapshotService(
            database, self.blobs, self.announcements, served=[BASE], poll_interval=0.05
        )
        changed = self.snapshots.routes_changed
        self.tenants = TenantService(database, self.announcements)
        self.keys = KeyService(
            database, self.announcements, admin_key="the operator's", clock=self.time
        )
        self.invalidated: list[Invalidate] = []
        self.bases = BaseService(database, changed, self._invalidate)
        self.registry = AdapterRegistry(database, self.blobs, changed, clock=self.time)
        self.aliases = AliasService(database, changed, clock=self.time)
        self.audit = AuditService(database)
        self.golden = GoldenAnswers()
        self.gates = GateService(database, self.golden, clock=self.time)
        self.routes = RouteService(database, self.snapshots, self.gates, clock=self.time)
        self.promotion = Promotion(self.aliases, self.gates, self.snapshots, self.tenants)
        self.revoked: list[CacheOwner] = []
        self.shares = ShareService(database, self.snapshots, self._revoke, clock=self.time)
        self.keeper = BlobKeeper(database, self.blobs, self.registry, grace=600.0, clock=self.time)

    async def _invalidate(self, command: Invalidate) -> None:
        self.invalidated.append(command)

    async def _revoke(self, owner: CacheOwner, author: str) -> None:
        self.revoked.append(owner)

    async def tenant(self, slug: str = "acme", **limits: int) -> TenantView:
        return await self.tenants.create(slug, TenantLimits(**limits), author="operator")

    async def upload(
        self,
        tenant: TenantView,
        text: str,
        adapter: str = "support",
        *,
        promote: str | None = None,
        size: int = 100,
    ) -> tuple[RevisionView, bool]:
        """Upload content that is nothing but `text`."""
        with self.blobs.staging() as staged:
            folder = staged / "content"
            folder.mkdir()
            (folder / "adapter_model.safetensors").write_text(text)
            content = RevisionContent(
                digest=digest_of(text), folder=str(folder), bytes=size, rank=8, targets=("q_proj",)
            )
            begun = await self.registry.begin_revision(
                tenant, adapter, BASE, content, author="key:1", promote=promote
            )
        return begun.revision, begun.created

    async def ready(
        self, tenant: TenantView, text: str, adapter: str = "support", promote: str | None = None
    ) -> RevisionView:
        """Upload and settle."""
        revision, _ = await self.upload(tenant, text, adapter, promote=promote)
        return await self.registry.settle(revision.id, PASSED)

    async def register_base(
        self, name: str = "tiny", digest: str = BASE, template: str = "none"
    ) -> None:
        await self.bases.register(
            name=name, digest=digest, folder="/bases/tiny", template_digest=template, config="{}"
        )


@pytest.fixture
async def process(database: Database, tmp_path: Path) -> AsyncIterator[Process]:
    live = LiveState()
    made = Process(database, tmp_path / "data", live, "one")
    await made.register_base()
    yield made
    await made.snapshots.stop()
    await live.close()
