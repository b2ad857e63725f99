"""Tenants: who shares the server, and how much each may use."""

import re

import msgspec
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.platform.coordination.announcements import Announcements, KeysChanged
from polyloom.platform.db.bounds import LARGEST_ID, LARGEST_NUMBER, check_number
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import TenantRow
from polyloom.platform.db.repositories import TenantRepository
from polyloom.platform.errors import Conflict, InvalidRequest, NotFound
from polyloom.platform.services.audit import note
from polyloom.platform.services.rows import tenant_view
from polyloom.platform.services.views import TenantLimits, TenantState, TenantView

_SLUG = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
NO_LIMITS = TenantLimits()
LEAST_WEIGHT = 0.01
LARGEST_WEIGHT = 100.0
LARGEST_LIMITS = {"tokens_per_minute": LARGEST_ID, "storage_bytes": LARGEST_ID}
"""Limits whose columns are of 64 bits; the others have 32."""


class TenantService:
    """Creates, changes and lists tenants. Every change is audited under `author`."""

    def __init__(self, database: Database, announcements: Announcements) -> None:
        self._database = database
        self._announcements = announcements

    async def create(
        self, slug: str, limits: TenantLimits = NO_LIMITS, *, author: str, weight: float = 1.0
    ) -> TenantView:
        """Raises InvalidRequest (slug, weight or a limit), Conflict (the slug is taken)."""
        if not _SLUG.fullmatch(slug):
            raise InvalidRequest(
                "a tenant's slug has 1 to 63 of a-z, 0-9 and -, and begins with no -", param="slug"
            )
        _check_limits(limits)
        _check_weight(weight)
        try:
            async with self._database.write() as session:
                row = TenantRow(slug=slug, weight=weight)
                _set_limits(row, limits)
                await TenantRepository(session).add(row)
                view = tenant_view(row)
                note(
                    session,
                    author=author,
                    action="tenant.create",
                    target=slug,
                    tenant_id=row.id,
                    after=limits,
                )
        except IntegrityError as error:
            raise Conflict(f"the tenant {slug!r} exists already", param="slug") from error
        return view

    async def get(self, slug: str) -> TenantView:
        """Raises NotFound."""
        async with self._database.read() as session:
            return tenant_view(await _found(session, slug))

    async def list(self) -> tuple[TenantView, ...]:
        """All tenants by slug."""
        async with self._database.read() as session:
            rows = await session.scalars(select(TenantRow).order_by(TenantRow.slug))
            return tuple(tenant_view(row) for row in rows)

    async def set_limits(self, slug: str, limits: TenantLimits, *, author: str) -> TenantView:
        """Replace all limits; in force everywhere within a second. Raises NotFound,
        InvalidRequest."""
        _check_limits(limits)
        async with self._database.write() as session:
            row = await _found(session, slug, lock=True)
            before = tenant_view(row).limits
            _set_limits(row, limits)
            note(
                session,
                author=author,
                action="tenant.limits",
                target=slug,
                tenant_id=row.id,
                before=before,
                after=limits,
            )
        await self._announcements.publish(KeysChanged())
        return tenant_view(row)

    async def set_weight(self, slug: str, weight: float, *, author: str) -> TenantView:
        """Change the tenant's share; in force for new requests within a second. Raises NotFound,
        InvalidRequest."""
        _check_weight(weight)
        async with self._database.write() as session:
            row = await _found(session, slug, lock=True)
            before, row.weight = row.weight, weight
            note(
                session,
                author=author,
                action="tenant.weight",
                target=slug,
                tenant_id=row.id,
                before=before,
                after=weight,
            )
        await self._announcements.publish(KeysChanged())
        return tenant_view(row)

    async def set_state(self, slug: str, state: TenantState, *, author: str) -> TenantView:
        """Disable or enable. A disabled tenant's keys stop working everywhere within a second.
        Raises NotFound."""
        async with self._database.write() as session:
            row = await _found(session, slug, lock=True)
            before, row.state = row.state, state
            note(
                session,
                author=author,
                action="tenant.state",
                target=slug,
                tenant_id=row.id,
                before=before,
                after=state,
            )
        await self._announcements.publish(KeysChanged())
        return tenant_view(row)


async def _found(session: AsyncSession, slug: str, *, lock: bool = False) -> TenantRow:
    row = None
    if _SLUG.fullmatch(slug):
        row = await TenantRepository(session).by_slug(slug, lock=lock)
    if row is None:
        raise NotFound(f"no tenant {slug!r}")
    return row


def _set_limits(row: TenantRow, limits: TenantLimits) -> None:
    row.requests_per_minute = limits.requests_per_minute
    row.tokens_per_minute = limits.tokens_per_minute
    row.concurrent_requests = limits.concurrent_requests
    row.adapter_limit = limits.adapters
    row.storage_bytes = limits.storage_bytes


def _check_weight(weight: float) -> None:
    if not LEAST_WEIGHT <= weight <= LARGEST_WEIGHT:
        raise InvalidRequest(
            f"{weight} is not between {LEAST_WEIGHT} and {LARGEST_WEIGHT:g}", param="weight"
        )


def _check_limits(limits: TenantLimits) -> None:
    for name, value in msgspec.structs.asdict(limits).items():
        check_number(name, value, LARGEST_LIMITS.get(name, LARGEST_NUMBER))
