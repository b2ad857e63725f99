"""Draft heads in the record: of a base (shared), and of revisions. At most one of each drafts.

A head cannot change what anybody is answered, only how fast, so it is `ready` as soon as it is
valid; whether it drafts is a promotion of its own.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.adapters.draft_heads.config import TrainingRecord
from polyloom.platform.clock import Clock, system_clock, utc
from polyloom.platform.db.draft_head_models import DraftHeadRow
from polyloom.platform.db.draft_head_repositories import DraftHeadRepository
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import LIVE_STATES, BaseRow, RevisionRow
from polyloom.platform.db.repositories import (
    AdapterRepository,
    RevisionRepository,
    RouteVersionRepository,
    TenantRepository,
)
from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.errors import Conflict, NotFound
from polyloom.platform.services.audit import note
from polyloom.platform.services.blobs import BlobStore
from polyloom.platform.services.uploads import check_storage, store_blob
from polyloom.platform.services.views import DraftHeadContent, DraftHeadView


@dataclass(frozen=True)
class RevisionOwner:
    """A tenant's revision, whose heads are deltas."""

    tenant_id: int
    adapter: str
    number: int


@dataclass(frozen=True)
class BaseOwner:
    """A base by digest, whose heads are shared."""

    digest: str


HeadOwner = RevisionOwner | BaseOwner


@dataclass(frozen=True)
class RecordedHead:
    """created: False if the owner had a ready head of this content already."""

    view: DraftHeadView
    created: bool


class UnloadingEngine(Protocol):
    """What retiring a head needs of the engines."""

    def retire(self, adapter_digest: str) -> Awaitable[None]:
        """Unload what has this digest. Raises EngineUnavailableError."""
        ...


class DraftHeadRegistry:
    """Every change of a draft head but the end of its revision, which ends it too."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        engine: UnloadingEngine,
        routes_changed: Callable[[], Awaitable[None]],
        *,
        clock: Clock = system_clock,
    ) -> None:
        """routes_changed: called after each committed change."""
        self._database = database
        self._blobs = blobs
        self._engine = engine
        self._routes_changed = routes_changed
        self._clock = clock

    async def list(self, owner: HeadOwner) -> tuple[DraftHeadView, ...]:
        """The owner's heads, newest first. Raises NotFound."""
        async with self._database.read() as session:
            held = await _owner(session, owner)
            rows = await DraftHeadRepository(session).of_owner(held.base.id, held.revision_id)
            return tuple(_view(row, held) for row in rows)

    async def record(
        self, owner: HeadOwner, content: DraftHeadContent, *, author: str, promote: bool
    ) -> RecordedHead:
        """Record validated content as the owner's next head.

        Raises NotFound, Conflict (the revision or the shared head has ended), QuotaExceeded.
        """
        await self._blobs.flush(Path(content.folder))
        async with self._database.write() as session:
            if isinstance(owner, RevisionOwner):
                tenant = await TenantRepository(session).lock(owner.tenant_id)
            held = await _owner(session, owner, lock=True)
            held.require_live()
            heads = DraftHeadRepository(session)
            version = await RouteVersionRepository(session).advance()
            if content.shared_digest is not None and not await heads.is_live(content.shared_digest):
                raise Conflict(f"the shared head {content.shared_digest} was retired")
            row = await heads.live_content(held.base.id, held.revision_id, content.digest)
            created = row is None
            if row is None:
                if isinstance(owner, RevisionOwner):
                    await check_storage(session, tenant, content.bytes)
                await store_blob(session, self._blobs, content)
                row = await heads.add(_row(held, content, author, await _next(heads, held)))
                held.note(session, row, author, "draft_head.upload")
            if promote:
                await self._promote(session, held, row, author, version)
            view = _view(row, held)
        await self._routes_changed()
        return RecordedHead(view, created)

    async def promote(self, owner: HeadOwner, number: int, *, author: str) -> DraftHeadView:
        """Draft with this head from now on. Raises NotFound, Conflict (it was retired)."""
        async with self._database.write() as session:
            held = await _owner(session, owner, lock=True)
            held.require_live()
            version = await RouteVersionRepository(session).advance()
            row = await _numbered(session, held, number)
            await self._promote(session, held, row, author, version)
            view = _view(row, held)
        await self._routes_changed()
        return view

    async def retire(self, owner: HeadOwner, number: int, *, author: str) -> DraftHeadView:
        """Take a head out of service for good; a shared one takes every delta on it along. Retiring
        twice is one retirement. Raises NotFound."""
        now = utc(self._clock)
        async with self._database.write() as session:
            held = await _owner(session, owner, lock=True)
            heads = DraftHeadRepository(session)
            version = await RouteVersionRepository(session).advance()
            row = await _numbered(session, held, number)
            if row.state == "ready":
                row.state, row.promoted, row.ended_at = "retired", False, now
                held.changed(version)
                held.note(session, row, author, "draft_head.retired")
                await session.flush()
                if row.shared_digest is None and not await heads.is_live(row.digest):
                    await heads.retire_deltas_on(row.digest, now, version)
            unload = not await heads.is_live(row.digest)
            view = _view(row, held)
        await self._routes_changed()
        if unload:
            await self._unload(view.digest)
        return view

    async def _promote(
        self, session: AsyncSession, held: "_Held", row: DraftHeadRow, author: str, version: int
    ) -> None:
        if row.state != "ready":
            raise Conflict(f"draft head {row.number} of {held.name} was retired")
        if not row.promoted:
            await DraftHeadRepository(session).demote(held.base.id, held.revision_id)
            row.promoted = True
            held.note(session, row, author, "draft_head.promoted")
        held.changed(version)

    async def _unload(self, digest: str) -> None:
        try:
            await self._engine.retire(digest)
        except EngineUnavailableError:
            return  # it will start without it


@dataclass(frozen=True)
class _Held:
    """An owner as rows. revision: None for the base itself."""

    base: BaseRow
    revision: RevisionRow | None

    @property
    def revision_id(self) -> int | None:
        return None if self.revision is None else self.revision.id

    @property
    def name(self) -> str:
        if self.revision is None:
            return self.base.name
        return f"{self.revision.adapter.name}@{self.revision.number}"

    def require_live(self) -> None:
        """Raises Conflict for a revision that has ended."""
        if self.revision is not None and self.revision.state not in LIVE_STATES:
            raise Conflict(f"{self.name} is {self.revision.state}: it cannot have draft heads")

    def changed(self, route_version: int) -> None:
        """Snapshots load bases always, adapters when they have changed."""
        if self.revision is not None:
            self.revision.adapter.route_version = route_version

    def note(self, session: AsyncSession, row: DraftHeadRow, author: str, action: str) -> None:
        tenant_id = None if self.revision is None else self.revision.adapter.tenant_id
        target = f"{self.name} draft head {row.number}"
        note(
            session,
            author=author,
            action=action,
            target=target,
            tenant_id=tenant_id,
            after=row.digest,
        )


async def _owner(session: AsyncSession, owner: HeadOwner, *, lock: bool = False) -> _Held:
    if isinstance(owner, BaseOwner):
        base = await session.scalar(select(BaseRow).where(BaseRow.digest == owner.digest))
        if base is None:
            raise NotFound(f"no base has the digest {owner.digest}")
        return _Held(base, None)
    adapters = AdapterRepository(session)
    find = adapters.lock if lock else adapters.named
    adapter = await find(owner.tenant_id, owner.adapter)
    row = None
    if adapter is not None:
        row = await RevisionRepository(session).numbered(adapter.id, owner.number)
    if row is None:
        raise NotFound(f"no revision {owner.number} of an adapter {owner.adapter!r}")
    return _Held(row.base, row)


async def _numbered(session: AsyncSession, held: _Held, number: int) -> DraftHeadRow:
    row = await DraftHeadRepository(session).numbered(held.base.id, held.revision_id, number)
    if row is None:
        raise NotFound(f"no draft head {number} of {held.name}")
    return row


async def _next(heads: DraftHeadRepository, held: _Held) -> int:
    return await heads.next_number(held.base.id, held.revision_id)


def _row(held: _Held, content: DraftHeadContent, author: str, number: int) -> DraftHeadRow:
    return DraftHeadRow(
        base_id=held.base.id,
        revision_id=held.revision_id,
        number=number,
        digest=content.digest,
        shared_digest=content.shared_digest,
        state="ready",
        promoted=False,
        bytes=content.bytes,
        rank=content.rank,
        drafts=content.drafts,
        training=content.training,
        author=author,
    )


def _view(row: DraftHeadRow, held: _Held) -> DraftHeadView:
    return DraftHeadView(
        owner=held.name,
        number=row.number,
        digest=row.digest,
        state=cast(Literal["ready", "retired"], row.state),
        promoted=row.promoted,
        bytes=row.bytes,
        rank=row.rank,
        drafts=row.drafts,
        shared_digest=row.shared_digest,
        training=(
            None if row.training is None else msgspec.json.decode(row.training, type=TrainingRecord)
        ),
        author=row.author,
        created_at=row.created_at,
        ended_at=row.ended_at,
    )
