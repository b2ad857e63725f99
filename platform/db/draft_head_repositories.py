"""Typed access to draft heads. They change under the lock of the route version."""

from collections.abc import Collection
from datetime import datetime

from sqlalchemy import func, select, update

from polyloom.platform.db.bounds import LARGEST_NUMBER
from polyloom.platform.db.draft_head_models import DraftHeadRow
from polyloom.platform.db.models import AdapterRow, RevisionRow
from polyloom.platform.db.repositories import Repository


class DraftHeadRepository(Repository[DraftHeadRow]):
    """Draft heads. An owner is a revision's id, or None for the base itself."""

    model_type = DraftHeadRow

    async def of_owner(self, base_id: int, revision_id: int | None) -> list[DraftHeadRow]:
        """All of an owner's heads, newest first."""
        return list(
            await self.session.scalars(
                select(DraftHeadRow)
                .where(DraftHeadRow.base_id == base_id, DraftHeadRow.revision_id == revision_id)
                .order_by(DraftHeadRow.number.desc())
            )
        )

    async def numbered(
        self, base_id: int, revision_id: int | None, number: int
    ) -> DraftHeadRow | None:
        """One of them."""
        if not 0 < number <= LARGEST_NUMBER:
            return None
        return await self.session.scalar(
            select(DraftHeadRow).where(
                DraftHeadRow.base_id == base_id,
                DraftHeadRow.revision_id == revision_id,
                DraftHeadRow.number == number,
            )
        )

    async def live_content(
        self, base_id: int, revision_id: int | None, digest: str
    ) -> DraftHeadRow | None:
        """The owner's ready head of this content."""
        return await self.session.scalar(
            select(DraftHeadRow).where(
                DraftHeadRow.base_id == base_id,
                DraftHeadRow.revision_id == revision_id,
                DraftHeadRow.digest == digest,
                DraftHeadRow.state == "ready",
            )
        )

    async def is_live(self, digest: str) -> bool:
        """Whether any ready head has this content."""
        found = await self.session.scalar(
            select(DraftHeadRow.id)
            .where(DraftHeadRow.digest == digest, DraftHeadRow.state == "ready")
            .limit(1)
        )
        return found is not None

    async def next_number(self, base_id: int, revision_id: int | None) -> int:
        newest = await self.session.scalar(
            select(func.max(DraftHeadRow.number)).where(
                DraftHeadRow.base_id == base_id, DraftHeadRow.revision_id == revision_id
            )
        )
        return (newest or 0) + 1

    async def promoted_of(self, revision_ids: Collection[int]) -> dict[int, DraftHeadRow]:
        """The promoted heads of these revisions, by revision."""
        rows = await self.session.scalars(
            select(DraftHeadRow).where(
                DraftHeadRow.promoted, DraftHeadRow.revision_id.in_(revision_ids)
            )
        )
        return {row.revision_id: row for row in rows if row.revision_id is not None}

    async def promoted_shared(self) -> dict[int, DraftHeadRow]:
        """The promoted shared heads, by base."""
        rows = await self.session.scalars(
            select(DraftHeadRow).where(DraftHeadRow.promoted, DraftHeadRow.revision_id.is_(None))
        )
        return {row.base_id: row for row in rows}

    async def demote(self, base_id: int, revision_id: int | None) -> None:
        """No head of this owner is promoted any more."""
        await self.session.execute(
            update(DraftHeadRow)
            .where(DraftHeadRow.base_id == base_id, DraftHeadRow.revision_id == revision_id)
            .values(promoted=False)
        )

    async def retire_of_revision(self, revision_id: int, now: datetime) -> None:
        """A revision has ended, and its heads with it."""
        await self.session.execute(
            update(DraftHeadRow)
            .where(DraftHeadRow.revision_id == revision_id, DraftHeadRow.state == "ready")
            .values(state="retired", promoted=False, ended_at=now)
        )

    async def retire_deltas_on(self, shared_digest: str, now: datetime, route_version: int) -> None:
        """A shared head has ended, and every delta on it; their adapters are loaded anew."""
        deltas = (DraftHeadRow.shared_digest == shared_digest, DraftHeadRow.state == "ready")
        adapters = (
            select(RevisionRow.adapter_id)
            .join(DraftHeadRow, DraftHeadRow.revision_id == RevisionRow.id)
            .where(*deltas)
        )
        await self.session.execute(
            update(AdapterRow)
            .where(AdapterRow.id.in_(adapters))
            .values(route_version=route_version)
            .execution_options(synchronize_session=False)
        )
        await self.session.execute(
            update(DraftHeadRow)
            .where(*deltas)
            .values(state="retired", promoted=False, ended_at=now)
            .execution_options(synchronize_session=False)
        )

    async def stored_bytes(self, tenant_id: int) -> int:
        """Bytes of the tenant's ready heads."""
        total = await self.session.scalar(
            select(func.sum(DraftHeadRow.bytes))
            .join(RevisionRow, RevisionRow.id == DraftHeadRow.revision_id)
            .join(AdapterRow, AdapterRow.id == RevisionRow.adapter_id)
            .where(AdapterRow.tenant_id == tenant_id, DraftHeadRow.state == "ready")
        )
        return int(total or 0)
