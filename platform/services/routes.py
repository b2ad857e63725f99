"""Routes: a public name that leads to weighted targets. Every change is a version, and going back
is choosing an older one.

A route changes as a whole, in one transaction under the lock of the route version; its targets must
all resolve then. What is retired afterwards makes its share an error, never something else.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.platform.clock import Clock, system_clock, utc
from polyloom.platform.db.bounds import check_number, check_text
from polyloom.platform.db.engine import Database
from polyloom.platform.db.repositories import RouteVersionRepository, TenantRepository
from polyloom.platform.db.route_models import RouteChangeRow, RouteRow
from polyloom.platform.db.route_repositories import RouteRepository
from polyloom.platform.errors import Conflict, NotFound
from polyloom.platform.services.audit import note
from polyloom.platform.services.gates import GateVersion
from polyloom.platform.services.route_plans import (
    check_drafts,
    check_targets,
    plan_change,
    require,
)
from polyloom.platform.services.route_rows import drafts_of, route_view, targets_of
from polyloom.platform.services.route_views import RoutePlan, RouteView
from polyloom.platform.services.snapshots import SnapshotService
from polyloom.platform.services.views import TenantView
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.snapshot import RouteSnapshot, RouteTarget


class RouteGate(Protocol):
    """What routes need of the gates."""

    async def check_route(
        self,
        tenant: TenantView,
        route: str,
        snapshot: RouteSnapshot,
        plan: RoutePlan,
        *,
        author: str,
    ) -> GateVersion:
        """Run the route's gate on targets that are new to it. Raises GateFailed,
        EngineUnavailable."""
        ...

    async def require(self, session: AsyncSession, passed: GateVersion) -> None:
        """Raises Conflict if the gate has changed since it was passed."""
        ...


class RouteService:
    """Changes routes, takes them back and tells their history."""

    def __init__(
        self,
        database: Database,
        snapshots: SnapshotService,
        gates: RouteGate,
        *,
        clock: Clock = system_clock,
    ) -> None:
        self._database = database
        self._snapshots = snapshots
        self._gates = gates
        self._clock = clock

    async def plan(
        self, tenant: TenantView, name: str, targets: Sequence[RouteTarget]
    ) -> RoutePlan:
        """What `put` would do, gates aside; nothing is written. Raises InvalidRequest."""
        check_targets(name, targets)
        return plan_change(await self._snapshots.refresh(), tenant.slug, name, targets)

    async def put(
        self,
        tenant: TenantView,
        name: str,
        targets: Sequence[RouteTarget],
        *,
        drafts: DraftPolicy | None = None,
        author: str,
        reason: str | None = None,
    ) -> RouteView:
        """Create the route, or make `targets` and `drafts` its next version; the same ones are no
        change.

        drafts: how tokens are drafted for requests that do not say; None for the server's way.
        Raises InvalidRequest (name, targets, drafts, reason), Conflict (a target that does not resolve, a
        name that is taken, a change meanwhile), GateFailed, EngineUnavailable (for the gate).
        """
        check_targets(name, targets)
        check_drafts(drafts)
        check_text("reason", reason)
        snapshot = await self._snapshots.refresh()
        plan = plan_change(snapshot, tenant.slug, name, targets)
        require(plan)
        passed = await self._gates.check_route(tenant, name, snapshot, plan, author=author)
        async with self._database.write() as session:
            version = await _locked(session, tenant)
            after = plan_change(await self._snapshots.seen_by(session), tenant.slug, name, targets)
            require(after)
            if _revisions(after) != _revisions(plan):
                raise Conflict("the targets' revisions changed meanwhile: try again")
            await self._gates.require(session, passed)
            row = await _row(session, tenant, name)
            wanted = (tuple(targets), drafts)
            if row.changes and _state(row.changes[0]) == wanted:
                return route_view(row, row.changes[0])
            view = self._change(session, row, *wanted, version, author=author, reason=reason)
        await self._snapshots.routes_changed()
        return view

    async def rollback(
        self,
        tenant: TenantView,
        name: str,
        *,
        to: int | None = None,
        author: str,
        reason: str | None = None,
    ) -> RouteView:
        """Back to version `to`, or to the newest before the one in force that was another and
        resolves; again: one further back. No gate stands in the way of what was in force before.

        Raises InvalidRequest (version, reason), NotFound, Conflict (nothing to go back to).
        """
        check_text("reason", reason)
        check_number("version", to)
        async with self._database.write() as session:
            version = await _locked(session, tenant)
            row = await _existing(session, tenant, name)
            snapshot = await self._snapshots.seen_by(session)
            target = _older(row, snapshot, tenant.slug) if to is None else _at(row, to)
            targets = targets_of(target)
            require(plan_change(snapshot, tenant.slug, name, targets))
            view = self._change(
                session,
                row,
                targets,
                drafts_of(target),
                version,
                author=author,
                reason=reason,
                restores=target.version,
            )
        await self._snapshots.routes_changed()
        return view

    async def delete(
        self, tenant: TenantView, name: str, *, author: str, reason: str | None = None
    ) -> RouteView:
        """Take the route away: a version without targets, so that it can be rolled back. Raises
        NotFound."""
        check_text("reason", reason)
        async with self._database.write() as session:
            version = await _locked(session, tenant)
            row = await _existing(session, tenant, name)
            if not row.changes[0].targets:
                raise NotFound(f"no route {name!r}")
            view = self._change(session, row, (), None, version, author=author, reason=reason)
        await self._snapshots.routes_changed()
        return view

    async def list(self, tenant_id: int) -> tuple[RouteView, ...]:
        """The tenant's routes by name; deleted ones are left out."""
        async with self._database.read() as session:
            rows = await RouteRepository(session).of_tenant(tenant_id)
            return tuple(route_view(row, row.current) for row in rows if row.current.targets)

    async def versions(self, tenant: TenantView, name: str) -> tuple[RouteView, ...]:
        """Every version, newest first, a deleted route's too. Raises NotFound."""
        async with self._database.read() as session:
            row = await _existing(session, tenant, name)
            return tuple(route_view(row, change) for change in row.changes)

    async def get(self, tenant: TenantView, name: str) -> RouteView:
        """The version in force. Raises NotFound."""
        newest = (await self.versions(tenant, name))[0]
        if not newest.targets:
            raise NotFound(f"no route {name!r}")
        return newest

    def _change(
        self,
        session: AsyncSession,
        row: RouteRow,
        targets: Sequence[RouteTarget],
        drafts: DraftPolicy | None,
        route_version: int,
        *,
        author: str,
        reason: str | None,
        restores: int | None = None,
    ) -> RouteView:
        before = _audited(*_state(row.changes[0])) if row.changes else None
        row.version += 1
        row.route_version = route_version
        change = RouteChangeRow(
            route=row,
            version=row.version,
            targets=msgspec.to_builtins(targets),
            drafts=None if drafts is None else str(drafts),
            author=author,
            reason=reason,
            restores=restores,
            route_version=route_version,
            created_at=utc(self._clock),
        )
        session.add(change)
        action = "rollback" if restores is not None else "put" if targets else "delete"
        note(
            session,
            author=author,
            action=f"route.{action}",
            target=row.name,
            tenant_id=row.tenant_id,
            before=before,
            after=_audited(targets, drafts),
        )
        return route_view(row, change)


async def _locked(session: AsyncSession, tenant: TenantView) -> int:
    """The next version of all routing state. Uploads create adapters under the tenant's lock, and
    a route may not take the name of one."""
    await TenantRepository(session).lock(tenant.id)
    return await RouteVersionRepository(session).advance()


async def _row(session: AsyncSession, tenant: TenantView, name: str) -> RouteRow:
    """The route, made if there is none."""
    routes = RouteRepository(session)
    row = await routes.named(tenant.id, name)
    if row is None:
        row = RouteRow(tenant_id=tenant.id, name=name, version=0, route_version=0, changes=[])
        await routes.add(row)
    return row


async def _existing(session: AsyncSession, tenant: TenantView, name: str) -> RouteRow:
    row = await RouteRepository(session).named(tenant.id, name)
    if row is None:
        raise NotFound(f"no route {name!r}")
    return row


def _at(row: RouteRow, version: int) -> RouteChangeRow:
    for change in row.changes:
        if change.version == version and change.targets:
            return change
    raise NotFound(f"the route {row.name!r} has no version {version} with targets")


def _older(row: RouteRow, snapshot: RouteSnapshot, tenant: str) -> RouteChangeRow:
    """The version to restore. A rollback in force counts as the version it restored, so a second
    one goes further back, not forth again."""
    present = row.changes[0]
    in_force = present.version if present.restores is None else present.restores
    for change in row.changes:
        if change.version >= in_force or change.restores is not None or not change.targets:
            continue
        plan = plan_change(snapshot, tenant, row.name, targets_of(change))
        served = all(target.refusal is None for target in plan.targets)
        if served and _state(change) != _state(present):
            return change
    raise Conflict("the route has had no older version whose targets can be served now")


def _state(change: RouteChangeRow) -> tuple[tuple[RouteTarget, ...], DraftPolicy | None]:
    """All that a version says."""
    return targets_of(change), drafts_of(change)


def _audited(targets: Sequence[RouteTarget], drafts: DraftPolicy | None) -> dict[str, object]:
    return {"targets": tuple(targets), "drafts": drafts}


def _revisions(plan: RoutePlan) -> list[str | None]:
    return [target.revision for target in plan.targets if target.share_after > 0]
