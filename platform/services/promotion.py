"""Moving an alias through the gates: what a client asks for, and what an upload asked for once it
is ready."""

import logging

from polyloom.platform.errors import PlatformError, Unavailable
from polyloom.platform.services.aliases import AliasService, not_ready
from polyloom.platform.services.gates import GateService, GateVersion
from polyloom.platform.services.snapshots import SnapshotService
from polyloom.platform.services.tenants import TenantService
from polyloom.platform.services.views import AliasView, CheckJob, PromotionVerdict, TenantView
from polyloom.routing.errors import RoutingError
from polyloom.routing.snapshot import AdapterKey

log = logging.getLogger(__name__)


class Promotion:
    """Gates before aliases."""

    def __init__(
        self,
        aliases: AliasService,
        gates: GateService,
        snapshots: SnapshotService,
        tenants: TenantService,
    ) -> None:
        self._aliases = aliases
        self._gates = gates
        self._snapshots = snapshots
        self._tenants = tenants

    async def move(
        self,
        tenant: TenantView,
        adapter: str,
        alias: str,
        number: int,
        *,
        author: str,
        reason: str | None = None,
    ) -> AliasView:
        """`AliasService.move`, once the revision has passed the gates before it. Raises what that
        does, GateFailed, and what a request for the revision can meet."""
        passed = await self._passed(tenant, adapter, alias, number, author)
        return await self._aliases.move(
            tenant.id,
            adapter,
            alias,
            number,
            author=author,
            reason=reason,
            require=lambda session: self._gates.require(session, passed),
        )

    async def verdict(self, job: CheckJob) -> PromotionVerdict | None:
        """Whether the alias that the upload asked for may move; None if it asked for none. Raises
        Unavailable when it must be tried again."""
        if job.promote is None:
            return None
        revision = job.revision
        try:
            await self._gates.check_alias(
                await self._tenants.get(revision.tenant),
                revision.adapter,
                job.promote,
                revision.number,
                await self._snapshots.refresh(),
                author=revision.author,
            )
        except Unavailable:
            raise
        except (PlatformError, RoutingError) as error:
            log.info("%s is not promoted to %s: %s", revision.label, job.promote, error.code)
            return PromotionVerdict(job.promote, error.message)
        return PromotionVerdict(job.promote)

    async def _passed(
        self, tenant: TenantView, adapter: str, alias: str, number: int, author: str
    ) -> GateVersion:
        """Nothing to pass where there is nothing to move, or it is there already. Raises Conflict
        for a revision that is not ready."""
        snapshot = await self._snapshots.refresh()
        entry = snapshot.adapters.get(AdapterKey(tenant.slug, adapter))
        revision = None if entry is None else entry.revisions.get(number)
        if entry is None or revision is None or entry.aliases.get(alias) == number:
            return ()
        if revision.state != "ready":
            raise not_ready(number, revision.state)
        return await self._gates.check_alias(
            tenant, adapter, alias, number, snapshot, author=author
        )
