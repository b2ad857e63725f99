"""Usage: one row for each finished request, written in batches off the request path."""

import asyncio
import logging
from collections import deque
from collections.abc import Collection
from datetime import datetime
from typing import Any, Literal

import msgspec
from sqlalchemy import ColumnElement, Select, func, insert, select
from sqlalchemy.exc import SQLAlchemyError

from polyloom.platform.db.bounds import check_moment, check_number, check_text
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import TenantRow, UsageRow
from polyloom.platform.periodic import Periodic
from polyloom.platform.services.views import UsageRecord, UsageTotal

log = logging.getLogger(__name__)

Grouping = Literal["tenant", "adapter", "revision"]
_COLUMNS = tuple(field.name for field in msgspec.structs.fields(UsageRecord))


class UsageRecorder:
    """Buffers records and writes them in the order they came.

    A batch that the database does not take stays at the head and is tried again: rows are unique by
    request id, so one whose commit was in doubt is not written twice. When `capacity` is reached the
    oldest are dropped, counted and logged: serving goes on.
    """

    def __init__(
        self,
        database: Database,
        *,
        flush_interval: float = 1.0,
        batch: int = 500,
        capacity: int = 100_000,
    ) -> None:
        self._database = database
        self._batch = batch
        self._buffer: deque[UsageRecord] = deque()
        self._capacity = capacity
        self._dropped = 0
        self._flushing = asyncio.Lock()
        self._flusher = Periodic(self.flush, flush_interval)

    @property
    def buffered(self) -> int:
        """Records not yet in the database."""
        return len(self._buffer)

    @property
    def dropped(self) -> int:
        """Records lost since the start: the database was away too long, or refused the row."""
        return self._dropped

    def record(self, usage: UsageRecord) -> None:
        """Never blocks, never raises."""
        if len(self._buffer) >= self._capacity:
            self._buffer.popleft()
            self._dropped += 1
            log.error("usage rows dropped since the start: %d", self._dropped)
        self._buffer.append(usage)

    async def start(self) -> None:
        """Flush every `flush_interval` seconds."""
        self._flusher.start()

    async def stop(self) -> None:
        """Write all, then end. Raises DatabaseUnavailable if the rows cannot be written."""
        await self._flusher.stop()
        await self.flush()

    async def flush(self) -> None:
        """Write everything recorded so far. Raises DatabaseUnavailable."""
        async with self._flushing:
            while self._buffer:
                rows = [self._buffer[i] for i in range(min(self._batch, len(self._buffer)))]
                await self._write(rows)
                self._forget(rows)

    def _forget(self, written: list[UsageRecord]) -> None:
        """Some may have been dropped at the head while they were being written."""
        ids = {usage.request_id for usage in written}
        while self._buffer and self._buffer[0].request_id in ids:
            self._buffer.popleft()

    async def _write(self, rows: list[UsageRecord]) -> None:
        try:
            await self._insert(rows)
        except SQLAlchemyError:
            if len(rows) == 1:
                self._dropped += 1
                log.exception("a usage row that the database refuses: %s", rows[0].request_id)
                return
            for row in rows:  # one of them is refused: the others are written all the same
                await self._write([row])

    async def _insert(self, rows: list[UsageRecord]) -> None:
        async with self._database.write() as session:
            known = set(
                await session.scalars(
                    select(UsageRow.request_id).where(
                        UsageRow.request_id.in_([row.request_id for row in rows])
                    )
                )
            )
            new = {r.request_id: msgspec.structs.asdict(r) for r in rows}
            fresh = [values for request_id, values in new.items() if request_id not in known]
            if fresh:
                await session.execute(insert(UsageRow), fresh)


class UsageFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which usage rows; None is any. since is inclusive, until is not."""

    tenant_id: int | None = None
    adapter: str | None = None
    revision: int | None = None
    since: datetime | None = None
    until: datetime | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest for what no row can be compared with."""
        check_text("adapter", self.adapter)
        check_number("revision", self.revision)
        check_moment("since", self.since)
        check_moment("until", self.until)

    def clauses(self) -> list[ColumnElement[bool]]:
        """As conditions on the usage table."""
        found = [
            getattr(UsageRow, name) == value
            for name, value in (
                ("tenant_id", self.tenant_id),
                ("adapter", self.adapter),
                ("revision", self.revision),
            )
            if value is not None
        ]
        if self.since is not None:
            found.append(UsageRow.created_at >= self.since)
        if self.until is not None:
            found.append(UsageRow.created_at < self.until)
        return found


ALL_USAGE = UsageFilter()


class UsageService:
    """Reads usage."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def rows(
        self, where: UsageFilter = ALL_USAGE, *, limit: int = 100
    ) -> tuple[UsageRecord, ...]:
        """Newest first. Raises InvalidRequest (limit)."""
        check_number("limit", limit)
        statement = (
            select(UsageRow)
            .where(*where.clauses())
            .order_by(UsageRow.created_at.desc(), UsageRow.id.desc())
            .limit(limit)
        )
        async with self._database.read() as session:
            return tuple(_record(row) for row in await session.scalars(statement))

    async def totals(
        self, where: UsageFilter = ALL_USAGE, *, group_by: Collection[Grouping] = ()
    ) -> tuple[UsageTotal, ...]:
        """Sums, one for each group that has rows, in the order of the groups' names."""
        async with self._database.read() as session:
            result = await session.execute(_totals(where, group_by))
            return tuple(_total(row._mapping) for row in result if row.requests)


def _totals(where: UsageFilter, group_by: Collection[Grouping]) -> Select[Any]:
    columns: dict[Grouping, ColumnElement[Any]] = {
        "tenant": TenantRow.slug.label("tenant"),
        "adapter": UsageRow.adapter.label("adapter"),
        "revision": UsageRow.revision.label("revision"),
    }
    groups = [columns[name] for name in columns if name in group_by]
    return (
        select(
            *groups,
            func.count().label("requests"),
            func.sum(UsageRow.prompt_tokens).label("prompt_tokens"),
            func.sum(UsageRow.completion_tokens).label("completion_tokens"),
            func.sum(UsageRow.cached_tokens).label("cached_tokens"),
            func.sum(UsageRow.accepted_draft_tokens).label("accepted_draft_tokens"),
            func.sum(UsageRow.rejected_draft_tokens).label("rejected_draft_tokens"),
            func.avg(UsageRow.ttft).label("mean_ttft"),
            func.avg(UsageRow.duration).label("mean_duration"),
        )
        .select_from(UsageRow)
        .join(TenantRow, TenantRow.id == UsageRow.tenant_id)
        .where(*where.clauses())
        .group_by(*groups)
        .order_by(*groups)
    )


def _total(row: Any) -> UsageTotal:
    return UsageTotal(
        tenant=row.get("tenant"),
        adapter=row.get("adapter"),
        revision=row.get("revision"),
        requests=row["requests"],
        prompt_tokens=int(row["prompt_tokens"]),
        completion_tokens=int(row["completion_tokens"]),
        cached_tokens=int(row["cached_tokens"]),
        accepted_draft_tokens=int(row["accepted_draft_tokens"]),
        rejected_draft_tokens=int(row["rejected_draft_tokens"]),
        mean_ttft=row["mean_ttft"],
        mean_duration=row["mean_duration"],
    )


def _record(row: UsageRow) -> UsageRecord:
    return UsageRecord(**{name: getattr(row, name) for name in _COLUMNS})
