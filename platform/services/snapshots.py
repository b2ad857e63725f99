"""Keeps the in-memory routing snapshot at the version of the record."""

import asyncio
import logging
from collections.abc import Collection, Mapping
from types import MappingProxyType

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.adapters.source import AdapterSource, DraftHeadSource
from polyloom.platform.coordination.announcements import Announcements, RoutesChanged
from polyloom.platform.db.draft_head_models import DraftHeadRow
from polyloom.platform.db.draft_head_repositories import DraftHeadRepository
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import AdapterRow, BaseRow
from polyloom.platform.db.repositories import AdapterRepository, RouteVersionRepository
from polyloom.platform.db.route_repositories import RouteRepository, ShareGroupRepository
from polyloom.platform.errors import DatabaseUnavailable
from polyloom.platform.periodic import Periodic
from polyloom.platform.services.blobs import BlobStore
from polyloom.platform.services.route_rows import group_entries, route_entry
from polyloom.platform.services.rows import revision_entry
from polyloom.routing.snapshot import (
    AdapterEntry,
    AdapterKey,
    BaseEntry,
    MountKey,
    RouteEntry,
    RouteKey,
    RouteSnapshot,
    ShareGroupEntry,
)

log = logging.getLogger(__name__)


class SnapshotService:
    """Loads what has changed: after a change here, on an announcement, and every `poll_interval`.

    A snapshot replaces the last one whole and only by a newer version, so a request sees one state
    and time never runs backwards. While the database is away the last one goes on serving.
    """

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        announcements: Announcements,
        *,
        served: Collection[str],
        poll_interval: float = 1.0,
    ) -> None:
        """served: digests of the bases whose engines this server has; only they can be named."""
        self._database = database
        self._blobs = blobs
        self._announcements = announcements
        self._served = tuple(served)
        self._current = RouteSnapshot(version=0)
        self._refreshing = asyncio.Lock()
        self._poller = Periodic(self.refresh, poll_interval)
        announcements.subscribe(RoutesChanged, self._heard)

    @property
    def current(self) -> RouteSnapshot:
        """The newest snapshot; version 0 and empty before `start`."""
        return self._current

    async def start(self) -> None:
        """Load, then keep up. Raises DatabaseUnavailable."""
        await self.refresh()
        self._poller.start()

    async def stop(self) -> None:
        """Stop polling."""
        await self._poller.stop()

    async def refresh(self) -> RouteSnapshot:
        """Load what is newer than `current`. Raises DatabaseUnavailable."""
        async with self._refreshing:
            async with self._database.read() as session:
                self._current = await self.seen_by(session)
            return self._current

    async def seen_by(self, session: AsyncSession) -> RouteSnapshot:
        """The routes as `session` sees them, its own changes included; `current` if it sees none
        that are newer."""
        known = self._current
        version = await RouteVersionRepository(session).current()
        if version <= known.version:
            return known
        return RouteSnapshot(
            version=version,
            bases=await self._bases(session),
            adapters=await self._adapters(session, known),
            routes=await _routes(session, known),
            groups=await _groups(session, known),
        )

    async def routes_changed(self) -> None:
        """A change was committed here: follow it, and tell the other processes."""
        try:
            snapshot = await self.refresh()
        except DatabaseUnavailable as error:
            log.warning("the routes are at version %d: %s", self._current.version, error)
            return
        await self._announcements.publish(RoutesChanged(snapshot.version))

    async def _bases(self, session: AsyncSession) -> MappingProxyType[str, BaseEntry]:
        rows = await session.scalars(select(BaseRow).where(BaseRow.digest.in_(self._served)))
        heads = await DraftHeadRepository(session).promoted_shared()
        return MappingProxyType(
            {
                row.name: BaseEntry(
                    row.name, row.digest, row.folder, row.template_digest, self._head(heads, row.id)
                )
                for row in rows
            }
        )

    async def _adapters(
        self, session: AsyncSession, known: RouteSnapshot
    ) -> MappingProxyType[AdapterKey, AdapterEntry]:
        adapters = dict(known.adapters)
        changed = await AdapterRepository(session).changed_since(known.version)
        revisions = [revision.id for row in changed for revision in row.revisions]
        heads = await DraftHeadRepository(session).promoted_of(revisions)
        for row in changed:
            adapters[AdapterKey(row.tenant.slug, row.name)] = self._entry(row, heads)
        return MappingProxyType(adapters)

    def _entry(self, row: AdapterRow, heads: Mapping[int, DraftHeadRow]) -> AdapterEntry:
        revisions = {
            r.number: revision_entry(r, self._source(r.digest), self._head(heads, r.id))
            for r in row.revisions
        }
        aliases = {alias.name: alias.current.revision.number for alias in row.aliases}
        return AdapterEntry(row.name, MappingProxyType(revisions), MappingProxyType(aliases))

    def _head(self, heads: Mapping[int, DraftHeadRow], owner_id: int) -> DraftHeadSource | None:
        row = heads.get(owner_id)
        if row is None:
            return None
        own = self._source(row.digest)
        if row.shared_digest is None:
            return DraftHeadSource(own)
        return DraftHeadSource(self._source(row.shared_digest), own)

    def _source(self, digest: str) -> AdapterSource:
        return AdapterSource(digest, str(self._blobs.path(digest)))

    async def _heard(self, announcement: RoutesChanged) -> None:
        if announcement.version > self._current.version:
            await self.refresh()


async def _routes(
    session: AsyncSession, known: RouteSnapshot
) -> MappingProxyType[RouteKey, RouteEntry]:
    routes = dict(known.routes)
    for row in await RouteRepository(session).changed_since(known.version):
        entry = route_entry(row)
        if entry.targets:
            routes[RouteKey(row.tenant.slug, row.name)] = entry
        else:
            routes.pop(RouteKey(row.tenant.slug, row.name), None)
    return MappingProxyType(routes)


async def _groups(
    session: AsyncSession, known: RouteSnapshot
) -> MappingProxyType[MountKey, ShareGroupEntry]:
    changed = await ShareGroupRepository(session).changed_since(known.version)
    uids = {row.uid for row in changed}
    groups = {key: entry for key, entry in known.groups.items() if entry.uid not in uids}
    for row in changed:
        groups.update(group_entries(row))
    return MappingProxyType(groups)
