"""Retiring a revision: out of the record first, then out of the engine."""

import logging
from collections.abc import Awaitable
from typing import Protocol

from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.engine.messages import Invalidate
from polyloom.platform.errors import Conflict
from polyloom.platform.services.adapters import AdapterRegistry
from polyloom.platform.services.snapshots import SnapshotService
from polyloom.platform.services.views import RevisionView, TenantView
from polyloom.routing.impact import routes_on
from polyloom.routing.request import CacheOwner

log = logging.getLogger(__name__)


class UnloadingEngine(Protocol):
    """What retirement needs of `EngineClient`."""

    def retire(self, adapter_digest: str) -> Awaitable[None]:
        """Unload a revision once no sequence holds it. Raises EngineUnavailableError."""
        ...


class Emptying(Protocol):
    """What retirement needs of `Invalidations`."""

    def invalidate(self, command: Invalidate, *, author: str) -> Awaitable[object]:
        """Record it, and make what agrees with `command` unreachable in every engine."""
        ...


class Retirement:
    """Takes revisions out of service."""

    def __init__(
        self,
        registry: AdapterRegistry,
        snapshots: SnapshotService,
        engine: UnloadingEngine,
        invalidations: Emptying,
    ) -> None:
        self._registry = registry
        self._snapshots = snapshots
        self._engine = engine
        self._invalidations = invalidations

    async def retire(
        self,
        tenant: TenantView,
        adapter: str,
        number: int,
        *,
        author: str,
        force: bool = False,
    ) -> RevisionView:
        """Retire, and unload the content unless another live revision has the same.

        force: also a revision that a route of the tenant leads to now; that share is answered with
        `revision_retired` until the route changes.  Raises NotFound, Conflict naming the routes.
        """

        async def no_route_leads_there(session: AsyncSession) -> None:
            snapshot = await self._snapshots.seen_by(session)
            if routes := routes_on(snapshot, tenant.slug, adapter, number):
                raise Conflict(
                    f"{adapter}@{number} has a share of {', '.join(map(repr, routes))}: change the"
                    " route first, or retire it with force=true",
                    param="force",
                )

        require = None if force else no_route_leads_there
        view = await self._registry.retire(
            tenant.id, adapter, number, author=author, require=require
        )
        await self._unload(view.digest)
        await self._empty_caches(view, author)
        return view

    async def quarantine(self, digest: str) -> None:
        """Take every revision of a content out of service whose stored files have changed."""
        views = await self._registry.quarantine(digest, "the stored files are not what they were")
        for view in views:
            log.error("%s of %s is quarantined: its files changed", view.label, view.tenant)

    async def _empty_caches(self, view: RevisionView, author: str) -> None:
        """Everybody's, if nobody has this content any more; else the tenant's own."""
        live = await self._registry.is_live(view.digest)
        owner = CacheOwner("tenant", view.tenant) if live else None
        await self._invalidations.invalidate(
            Invalidate(cause="revision_retired", owner=owner, adapter_digest=view.digest),
            author=author,
        )

    async def _unload(self, digest: str) -> None:
        if await self._registry.is_live(digest):
            return
        try:
            await self._engine.retire(digest)
        except EngineUnavailableError:
            log.info("%s is not unloaded: the engine is away and will start without it", digest)
