"""Typed access to the tables, for the services' statements that are more than a line.

Rows are locked FOR NO KEY UPDATE (`key_share`): others can still insert rows that refer to a locked
one. Under FOR UPDATE an audit row would wait for its tenant's lock, whose holder may be waiting for
the adapter that the audited change has locked.
"""

from collections.abc import Collection
from datetime import datetime
from typing import TypeVar

from advanced_alchemy.base import IdentityBase
from advanced_alchemy.repository import SQLAlchemyAsyncRepository
from sqlalchemy import func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import joinedload, selectinload

from polyloom.platform.db.bounds import LARGEST_ID, LARGEST_NUMBER
from polyloom.platform.db.draft_head_models import DraftHeadRow
from polyloom.platform.db.models import (
    LIVE_STATES,
    AdapterRow,
    AliasChangeRow,
    AliasRow,
    ApiKeyRow,
    AuditRow,
    BaseRow,
    BlobRow,
    RevisionRow,
    RouteVersionRow,
    TenantRow,
    UsageRow,
)

Row = TypeVar("Row", bound=IdentityBase)


class Repository(SQLAlchemyAsyncRepository[Row]):
    """What the repositories share: errors come as SQLAlchemy's own, which `Database` translates,
    and what is added keeps the relations that it was added with."""

    def __init__(self, session: AsyncSession) -> None:
        super().__init__(session=session, wrap_exceptions=False, auto_refresh=False)


class TenantRepository(Repository[TenantRow]):
    """Tenants."""

    model_type = TenantRow

    async def by_slug(self, slug: str, *, lock: bool = False) -> TenantRow | None:
        """The tenant, locked against concurrent uploads and changes if `lock`."""
        statement = select(TenantRow).where(TenantRow.slug == slug)
        if lock:
            statement = statement.with_for_update(key_share=True)
        return await self.session.scalar(statement)

    async def lock(self, tenant_id: int) -> TenantRow:
        """Serialise with everything else that counts the tenant's adapters and bytes."""
        statement = select(TenantRow).where(TenantRow.id == tenant_id)
        return (await self.session.scalars(statement.with_for_update(key_share=True))).one()


class ApiKeyRepository(Repository[ApiKeyRow]):
    """API keys."""

    model_type = ApiKeyRow

    async def by_hash(self, key_hash: str) -> ApiKeyRow | None:
        """The key with its tenant."""
        return await self.session.scalar(
            select(ApiKeyRow)
            .where(ApiKeyRow.key_hash == key_hash)
            .options(joinedload(ApiKeyRow.tenant))
        )

    async def of_tenant(self, slug: str, key_id: int) -> ApiKeyRow | None:
        """The key if it is that tenant's, locked."""
        if not 0 < key_id <= LARGEST_ID:
            return None
        return await self.session.scalar(
            select(ApiKeyRow)
            .join(ApiKeyRow.tenant)
            .where(TenantRow.slug == slug, ApiKeyRow.id == key_id)
            .with_for_update(key_share=True, of=ApiKeyRow)
        )


class BaseRepository(Repository[BaseRow]):
    """Bases."""

    model_type = BaseRow


class BlobRepository(Repository[BlobRow]):
    """Blobs."""

    model_type = BlobRow

    async def known(self) -> set[str]:
        """Digests of all blobs."""
        return set(await self.session.scalars(select(BlobRow.digest)))

    async def by_digest(self, digest: str) -> BlobRow | None:
        """The blob; the route version must be locked before it is changed."""
        return await self.session.scalar(select(BlobRow).where(BlobRow.digest == digest))

    async def releasable(self, before: datetime) -> list[BlobRow]:
        """Blobs that no revision and no draft head has needed since `before`."""
        revisions = select(RevisionRow.id).where(
            RevisionRow.digest == BlobRow.digest,
            or_(RevisionRow.state.in_(LIVE_STATES), RevisionRow.ended_at > before),
        )
        heads = select(DraftHeadRow.id).where(
            DraftHeadRow.digest == BlobRow.digest,
            or_(DraftHeadRow.state == "ready", DraftHeadRow.ended_at > before),
        )
        unneeded = select(BlobRow).where(~revisions.exists(), ~heads.exists())
        return list(await self.session.scalars(unneeded))


class AdapterRepository(Repository[AdapterRow]):
    """Adapters."""

    model_type = AdapterRow

    async def lock(self, tenant_id: int, name: str) -> AdapterRow | None:
        """The adapter, locked against every other change of its revisions and aliases."""
        return await self.session.scalar(
            select(AdapterRow)
            .where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name)
            .options(joinedload(AdapterRow.tenant))
            .with_for_update(key_share=True, of=AdapterRow)
        )

    async def lock_of(self, revision_id: int) -> AdapterRow | None:
        """The revision's adapter with its tenant, locked as by `lock`."""
        return await self.session.scalar(
            select(AdapterRow)
            .join(RevisionRow)
            .where(RevisionRow.id == revision_id)
            .options(joinedload(AdapterRow.tenant))
            .with_for_update(key_share=True, of=AdapterRow)
        )

    async def lock_holders(self, digest: str) -> list[AdapterRow]:
        """Every adapter with a live revision of this content, locked in the order of their ids."""
        holders = select(RevisionRow.adapter_id).where(
            RevisionRow.digest == digest, RevisionRow.state.in_(LIVE_STATES)
        )
        return list(
            await self.session.scalars(
                select(AdapterRow)
                .where(AdapterRow.id.in_(holders))
                .order_by(AdapterRow.id)
                .options(joinedload(AdapterRow.tenant))
                .with_for_update(key_share=True, of=AdapterRow)
            )
        )

    async def of_tenant(self, tenant_id: int) -> list[AdapterRow]:
        """All of a tenant's adapters by name, with what `adapter_view` shows."""
        return list(
            await self.session.scalars(
                select(AdapterRow)
                .where(AdapterRow.tenant_id == tenant_id)
                .order_by(AdapterRow.name)
                .options(*_VIEWED)
            )
        )

    async def named(self, tenant_id: int, name: str) -> AdapterRow | None:
        """One adapter, with what `adapter_view` shows."""
        return await self.session.scalar(
            select(AdapterRow)
            .where(AdapterRow.tenant_id == tenant_id, AdapterRow.name == name)
            .options(*_VIEWED)
        )

    async def changed_since(self, route_version: int) -> list[AdapterRow]:
        """Adapters whose routing changed after `route_version`, with what a snapshot needs."""
        return list(
            await self.session.scalars(
                select(AdapterRow).where(AdapterRow.route_version > route_version).options(*_VIEWED)
            )
        )


class RevisionRepository(Repository[RevisionRow]):
    """Revisions. Their states change only under the lock of their adapter."""

    model_type = RevisionRow

    async def viewed(self, **fields: object) -> RevisionRow | None:
        """The revision whose columns equal `fields`, with its adapter, tenant and base."""
        return await self.session.scalar(
            select(RevisionRow).filter_by(**fields).options(*_WITH_OWNER)
        )

    async def numbered(self, adapter_id: int, number: int) -> RevisionRow | None:
        """An adapter's revision, with its adapter, tenant and base."""
        if not 0 < number <= LARGEST_NUMBER:
            return None
        return await self.viewed(adapter_id=adapter_id, number=number)

    async def live_content(self, adapter_id: int, base_id: int, digest: str) -> RevisionRow | None:
        """The adapter's live revision of this content on this base; there is at most one."""
        return await self.session.scalar(
            select(RevisionRow)
            .where(
                RevisionRow.adapter_id == adapter_id,
                RevisionRow.base_id == base_id,
                RevisionRow.digest == digest,
                RevisionRow.state.in_(LIVE_STATES),
            )
            .options(*_WITH_OWNER)
        )

    async def live(self, digest: str | None = None) -> list[RevisionRow]:
        """Checking and ready revisions of all tenants, of one content if given."""
        statement = (
            select(RevisionRow)
            .where(RevisionRow.state.in_(LIVE_STATES))
            .order_by(RevisionRow.id)
            .options(*_WITH_OWNER)
        )
        if digest is not None:
            statement = statement.where(RevisionRow.digest == digest)
        return list(await self.session.scalars(statement))

    async def next_number(self, adapter_id: int) -> int:
        """The number after the adapter's newest; the adapter must be locked."""
        newest = await self.session.scalar(
            select(func.max(RevisionRow.number)).where(RevisionRow.adapter_id == adapter_id)
        )
        return (newest or 0) + 1

    async def stored_bytes(self, tenant_id: int) -> int:
        """Bytes of the tenant's live revisions."""
        total = await self.session.scalar(
            select(func.sum(RevisionRow.bytes))
            .join(AdapterRow)
            .where(AdapterRow.tenant_id == tenant_id, RevisionRow.state.in_(LIVE_STATES))
        )
        return int(total or 0)

    async def unclaimed(
        self, now: datetime, bases: Collection[str], limit: int
    ) -> list[RevisionRow]:
        """Revisions in `checking` on these bases (digests) that no process holds, oldest first,
        locked until the transaction ends."""
        return list(
            await self.session.scalars(
                select(RevisionRow)
                .where(
                    RevisionRow.state == "checking",
                    RevisionRow.base.has(BaseRow.digest.in_(bases)),
                    or_(RevisionRow.claimed_until.is_(None), RevisionRow.claimed_until <= now),
                )
                .order_by(RevisionRow.id)
                .limit(limit)
                .options(*_WITH_OWNER)
                .with_for_update(key_share=True, of=RevisionRow, skip_locked=True)
            )
        )


class AliasRepository(Repository[AliasRow]):
    """Aliases."""

    model_type = AliasRow

    async def named(self, adapter_id: int, name: str) -> AliasRow | None:
        """The alias with its history, newest change first."""
        return await self.session.scalar(
            select(AliasRow)
            .where(AliasRow.adapter_id == adapter_id, AliasRow.name == name)
            .options(selectinload(AliasRow.changes).joinedload(AliasChangeRow.revision))
            .execution_options(populate_existing=True)
        )


class UsageRepository(Repository[UsageRow]):
    """Usage rows."""

    model_type = UsageRow


class AuditRepository(Repository[AuditRow]):
    """The audit trail."""

    model_type = AuditRow


class RouteVersionRepository(Repository[RouteVersionRow]):
    """The one version of all routing state."""

    model_type = RouteVersionRow

    async def current(self) -> int:
        """The version of the state that the transaction sees."""
        return (await self.session.scalars(select(RouteVersionRow.version))).one()

    async def advance(self) -> int:
        """The next version. Its row stays locked to the end of the transaction, so versions are
        committed in their order and no snapshot can miss one. Locks are taken in the order
        tenant, adapter, version; blobs change under the last."""
        statement = (
            update(RouteVersionRow)
            .values(version=RouteVersionRow.version + 1)
            .returning(RouteVersionRow.version)
        )
        return (await self.session.scalars(statement)).one()


_WITH_OWNER = (
    joinedload(RevisionRow.adapter).joinedload(AdapterRow.tenant),
    joinedload(RevisionRow.base),
)
_VIEWED = (
    joinedload(AdapterRow.tenant),
    selectinload(AdapterRow.revisions).joinedload(RevisionRow.base),
    selectinload(AdapterRow.aliases)
    .selectinload(AliasRow.current)
    .joinedload(AliasChangeRow.revision),
)
