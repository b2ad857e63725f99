"""Typed access to routes, gates and share groups. They change only under the lock of the route
version (`RouteVersionRepository.advance`), so none of these rows is locked by itself."""

from collections.abc import Sequence

from sqlalchemy import or_, select
from sqlalchemy.orm import joinedload, selectinload

from polyloom.platform.db.repositories import Repository
from polyloom.platform.db.route_models import (
    GateRow,
    GateRunRow,
    RouteRow,
    SharedRevisionRow,
    ShareGroupRow,
    ShareMemberRow,
)


class RouteRepository(Repository[RouteRow]):
    """Routes, deleted ones among them."""

    model_type = RouteRow

    async def named(self, tenant_id: int, name: str) -> RouteRow | None:
        """The route with its history, newest change first."""
        return await self.session.scalar(
            select(RouteRow)
            .where(RouteRow.tenant_id == tenant_id, RouteRow.name == name)
            .options(joinedload(RouteRow.tenant), selectinload(RouteRow.changes))
            .execution_options(populate_existing=True)
        )

    async def of_tenant(self, tenant_id: int) -> Sequence[RouteRow]:
        """All of a tenant's routes by name, with their newest change."""
        return (
            await self.session.scalars(
                select(RouteRow)
                .where(RouteRow.tenant_id == tenant_id)
                .order_by(RouteRow.name)
                .options(joinedload(RouteRow.tenant), selectinload(RouteRow.current))
            )
        ).all()

    async def changed_since(self, route_version: int) -> Sequence[RouteRow]:
        """Routes that changed after `route_version`, with their tenant and newest change."""
        return (
            await self.session.scalars(
                select(RouteRow)
                .where(RouteRow.route_version > route_version)
                .options(joinedload(RouteRow.tenant), selectinload(RouteRow.current))
            )
        ).all()


class GateRepository(Repository[GateRow]):
    """Gates."""

    model_type = GateRow

    async def of(
        self, *, adapter_id: int | None = None, route_id: int | None = None
    ) -> GateRow | None:
        """The gate of an adapter or of a route."""
        subject = (
            GateRow.route_id == route_id if adapter_id is None else GateRow.adapter_id == adapter_id
        )
        return await self.session.scalar(
            select(GateRow).where(subject).execution_options(populate_existing=True)
        )

    async def runs(self, gate_id: int, limit: int) -> Sequence[GateRunRow]:
        """Newest first."""
        return (
            await self.session.scalars(
                select(GateRunRow)
                .where(GateRunRow.gate_id == gate_id)
                .order_by(GateRunRow.id.desc())
                .limit(limit)
            )
        ).all()


class ShareGroupRepository(Repository[ShareGroupRow]):
    """Share groups, deleted ones among them."""

    model_type = ShareGroupRow

    async def owned(self, tenant_id: int, name: str) -> ShareGroupRow | None:
        """The live group that the tenant owns under this name, with all that is in it."""
        return await self.session.scalar(
            select(ShareGroupRow)
            .where(
                ShareGroupRow.owner_id == tenant_id,
                ShareGroupRow.name == name,
                ShareGroupRow.deleted_at.is_(None),
            )
            .options(*_WHOLE)
            .execution_options(populate_existing=True)
        )

    async def by_uid(self, uid: str) -> ShareGroupRow | None:
        """The live group, with all that is in it."""
        return await self.session.scalar(
            select(ShareGroupRow)
            .where(ShareGroupRow.uid == uid, ShareGroupRow.deleted_at.is_(None))
            .options(*_WHOLE)
            .execution_options(populate_existing=True)
        )

    async def seen_by(self, tenant_id: int) -> Sequence[ShareGroupRow]:
        """Live groups that the tenant owns, is in or is invited to, with all that is in them."""
        member = select(ShareMemberRow.group_id).where(ShareMemberRow.tenant_id == tenant_id)
        return (
            await self.session.scalars(
                select(ShareGroupRow)
                .where(
                    ShareGroupRow.deleted_at.is_(None),
                    or_(ShareGroupRow.owner_id == tenant_id, ShareGroupRow.id.in_(member)),
                )
                .order_by(ShareGroupRow.id)
                .options(*_WHOLE)
            )
        ).all()

    async def changed_since(self, route_version: int) -> Sequence[ShareGroupRow]:
        """Groups that changed after `route_version`, with all that is in them."""
        return (
            await self.session.scalars(
                select(ShareGroupRow)
                .where(ShareGroupRow.route_version > route_version)
                .options(*_WHOLE)
            )
        ).all()


_WHOLE = (
    joinedload(ShareGroupRow.owner),
    selectinload(ShareGroupRow.members).joinedload(ShareMemberRow.tenant),
    selectinload(ShareGroupRow.revisions).options(
        joinedload(SharedRevisionRow.adapter), joinedload(SharedRevisionRow.revision)
    ),
)
