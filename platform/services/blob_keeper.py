"""Keeps the blob store and the record in agreement: at the start, and as revisions end."""

import logging
from datetime import timedelta

from polyloom.platform.clock import Clock, system_clock, utc
from polyloom.platform.db.engine import Database
from polyloom.platform.db.repositories import (
    BlobRepository,
    RevisionRepository,
    RouteVersionRepository,
)
from polyloom.platform.periodic import Periodic
from polyloom.platform.services.adapters import AdapterRegistry
from polyloom.platform.services.blobs import BlobStore

log = logging.getLogger(__name__)

ORPHAN_SECONDS = 3600.0


class BlobKeeper:
    """Deletes what nothing refers to, and takes out of service what lost its bytes."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        registry: AdapterRegistry,
        *,
        grace: float,
        interval: float = 60.0,
        orphan_age: float = ORPHAN_SECONDS,
        clock: Clock = system_clock,
    ) -> None:
        """grace: seconds for which a blob outlives its last live revision: as long as a request may
        run, for one that was queued before still has to load it.  orphan_age: seconds after which
        what a crash left is swept."""
        self._database = database
        self._blobs = blobs
        self._registry = registry
        self._grace = grace
        self._orphan_age = orphan_age
        self._clock = clock
        self._collector = Periodic(self.collect, interval)
        self._sweeper = Periodic(self.sweep, orphan_age)

    async def start(self) -> None:
        """Bring store and record into agreement, then collect every `interval` seconds, and sweep
        every `orphan_age`: what a crash left just before the start is too young then."""
        await self.quarantine_missing()
        await self.sweep()
        self._collector.start()
        self._sweeper.start()

    async def stop(self) -> None:
        """Stop collecting and sweeping."""
        await self._collector.stop()
        await self._sweeper.stop()

    async def collect(self, grace: float | None = None) -> int:
        """Delete the blobs that no revision has needed for `grace` seconds (the keeper's own if
        None). Returns how many."""
        before = utc(self._clock) - timedelta(seconds=self._grace if grace is None else grace)
        async with self._database.read() as session:
            if not await BlobRepository(session).releasable(before):
                return 0
        async with self._database.write() as session:
            await RouteVersionRepository(session).advance()
            rows = await BlobRepository(session).releasable(before)
            for row in rows:
                await session.delete(row)
            await session.flush()
            for row in rows:
                self._blobs.take_out(row.digest)
        await self._blobs.empty_trash()
        return len(rows)

    async def sweep(self, min_age: float | None = None) -> int:
        """Delete folders that a crash left, untouched for `min_age` seconds (the keeper's own if
        None). Returns how many."""
        async with self._database.read() as session:
            known = await BlobRepository(session).known()
        return await self._blobs.sweep(known, self._orphan_age if min_age is None else min_age)

    async def quarantine_missing(self) -> None:
        """Take revisions whose folder is gone out of service, before a request finds out."""
        async with self._database.read() as session:
            digests = {row.digest for row in await RevisionRepository(session).live()}
        for digest in sorted(digests):
            if not self._blobs.holds(digest):
                log.error("the stored files of %s are missing", digest)
                await self._registry.quarantine(digest, "its stored files are missing")
