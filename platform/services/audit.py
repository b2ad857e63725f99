"""The audit trail: who changed what, written in the transaction of the change itself."""

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import aliased

from polyloom.platform.db.bounds import LARGEST_ID, check_number
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import AuditRow, TenantRow
from polyloom.platform.services.views import AuditEntry


def note(
    session: AsyncSession,
    *,
    author: str,
    action: str,
    target: str,
    tenant_id: int | None = None,
    before: object = None,
    after: object = None,
) -> None:
    """Record a change within `session`'s transaction; `before` and `after` are encoded as JSON."""
    session.add(
        AuditRow(
            tenant_id=tenant_id,
            author=author,
            action=action,
            target=target,
            before=_text(before),
            after=_text(after),
        )
    )


class AuditService:
    """Reads the trail."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def entries(
        self, *, tenant_id: int | None = None, before_id: int | None = None, limit: int = 100
    ) -> tuple[AuditEntry, ...]:
        """Newest first; of one tenant if given; older than entry `before_id` if given. Raises
        InvalidRequest (before_id, limit)."""
        check_number("before_id", before_id, LARGEST_ID)
        check_number("limit", limit)
        tenant = aliased(TenantRow)
        statement = (
            select(AuditRow, tenant.slug)
            .outerjoin(tenant, tenant.id == AuditRow.tenant_id)
            .order_by(AuditRow.id.desc())
            .limit(limit)
        )
        if tenant_id is not None:
            statement = statement.where(AuditRow.tenant_id == tenant_id)
        if before_id is not None:
            statement = statement.where(AuditRow.id < before_id)
        async with self._database.read() as session:
            rows = (await session.execute(statement)).all()
        return tuple(_entry(row, slug) for row, slug in rows)


def _entry(row: AuditRow, slug: str | None) -> AuditEntry:
    return AuditEntry(
        id=row.id,
        tenant=slug,
        author=row.author,
        action=row.action,
        target=row.target,
        before=row.before,
        after=row.after,
        created_at=row.created_at,
    )


def _text(value: object) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()
