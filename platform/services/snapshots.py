"""Keeps the in-memory routing snapshot at the version of the record."""

import asyncio
import logging
from collections.abc import Collection, Iterable
from types import MappingProxyType

from sqlalchemy import select

from polyloom.platform.coordination.announcements import Announcements, RoutesChanged
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import AdapterRow, BaseRow
from polyloom.platform.db.repositories import AdapterRepository, RouteVersionRepository
from polyloom.platform.errors import DatabaseUnavailable
from polyloom.platform.periodic import Periodic
from polyloom.platform.services.blobs import BlobStore
from polyloom.platform.services.rows import revision_entry
from polyloom.routing.snapshot import AdapterEntry, AdapterKey, BaseEntry, RouteSnapshot

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
                version = await RouteVersionRepository(session).current()
                if version <= self._current.version:
                    return self._current
                adapters = AdapterRepository(session)
                changed = await adapters.changed_since(self._current.version)
                bases = await session.scalars(
                    select(BaseRow).where(BaseRow.digest.in_(self._served))
                )
                self._current = self._next(version, changed, bases)
            return self._current

    async def routes_changed(self) -> None:
        """A change was committed here: follow it, and tell the other processes."""
        try:
            snapshot = await self.refresh()
        except DatabaseUnavailable as error:
            log.warning("the routes are at version %d: %s", self._current.version, error)
            return
        await self._announcements.publish(RoutesChanged(snapshot.version))

    def _next(
        self, version: int, changed: Iterable[AdapterRow], bases: Iterable[BaseRow]
    ) -> RouteSnapshot:
        adapters = dict(self._current.adapters)
        for row in changed:
            adapters[AdapterKey(row.tenant.slug, row.name)] = self._entry(row)
        return RouteSnapshot(
            version=version,
            bases=MappingProxyType(
                {b.name: BaseEntry(b.name, b.digest, b.folder, b.template_digest) for b in bases}
            ),
            adapters=MappingProxyType(adapters),
        )

    def _entry(self, row: AdapterRow) -> AdapterEntry:
        revisions = {
            r.number: revision_entry(r, str(self._blobs.path(r.digest))) for r in row.revisions
        }
        aliases = {alias.name: alias.current.revision.number for alias in row.aliases}
        return AdapterEntry(row.name, MappingProxyType(revisions), MappingProxyType(aliases))

    async def _heard(self, announcement: RoutesChanged) -> None:
        if announcement.version > self._current.version:
            await self.refresh()
