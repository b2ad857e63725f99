"""Making cached blocks unreachable, in every engine of every server, each time with its cause.

The row is what counts: servers apply the rows that are newer than what they have applied, on an
announcement and at every look. Applying one twice does no harm.
"""

import logging
from typing import Literal, cast

import msgspec
from sqlalchemy import func, select

from polyloom.platform.coordination.announcements import Announcements, CachesInvalidated
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import DIGEST_LENGTH, NAME_LENGTH
from polyloom.platform.db.prefix_models import PrefixInvalidationRow
from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.engine.messages import CacheReport, Invalidate, InvalidationCause
from polyloom.platform.engine.pool import EnginePool
from polyloom.platform.errors import DatabaseUnavailable, InvalidRequest
from polyloom.platform.services.prefix_views import InvalidationView
from polyloom.routing.request import CacheOwner

log = logging.getLogger(__name__)


class Invalidations:
    """Writes invalidations, and has this server's engines obey them."""

    def __init__(self, database: Database, announcements: Announcements, pool: EnginePool) -> None:
        self._database = database
        self._announcements = announcements
        self._pool = pool
        self._applied = 0
        self._own: set[int] = set()
        announcements.subscribe(CachesInvalidated, self._heard)

    async def start(self) -> None:
        """Engines that start now hold nothing yet: older rows do not concern them. Raises
        DatabaseUnavailable."""
        async with self._database.read() as session:
            newest = await session.scalar(select(func.max(PrefixInvalidationRow.id)))
        self._applied = newest or 0

    async def invalidate(self, command: Invalidate, *, author: str) -> InvalidationView:
        """Record and apply. Raises InvalidRequest (a field's text), DatabaseUnavailable."""
        _check(command)
        owner = command.owner
        row = PrefixInvalidationRow(
            cause=command.cause,
            owner_kind=None if owner is None else owner.kind,
            owner_name=None if owner is None else owner.name,
            base_digest=command.base_digest,
            adapter_digest=command.adapter_digest,
            template_digest=command.template_digest,
            author=author,
        )
        before = await self._freed(command.cause)
        async with self._database.write() as session:
            session.add(row)
            await session.flush()
            self._own.add(row.id)
        await self._apply(command)
        after = await self._freed(command.cause)
        if before is not None and after is not None:
            async with self._database.write() as session:
                row = await session.merge(row)
                row.blocks_freed = max(0, after - before)
        await self._announcements.publish(CachesInvalidated(row.id))
        return invalidation_view(row)

    async def follow(self) -> None:
        """Apply what other servers have recorded. Raises DatabaseUnavailable."""
        statement = (
            select(PrefixInvalidationRow)
            .where(PrefixInvalidationRow.id > self._applied)
            .order_by(PrefixInvalidationRow.id)
        )
        async with self._database.read() as session:
            rows = (await session.scalars(statement)).all()
        for row in rows:
            if row.id in self._own:
                self._own.discard(row.id)
            else:
                await self._apply(_command(row))
            self._applied = max(self._applied, row.id)

    async def latest(
        self, owner: CacheOwner | None = None, limit: int = 50
    ) -> tuple[InvalidationView, ...]:
        """Newest first; those that named `owner`, if given. Raises DatabaseUnavailable."""
        statement = select(PrefixInvalidationRow).order_by(PrefixInvalidationRow.id.desc())
        if owner is not None:
            statement = statement.filter_by(owner_kind=owner.kind, owner_name=owner.name)
        async with self._database.read() as session:
            rows = await session.scalars(statement.limit(limit))
            return tuple(invalidation_view(row) for row in rows)

    async def _apply(self, command: Invalidate) -> None:
        """An engine that is away starts with nothing cached."""
        try:
            await self._pool.invalidate(command)
        except EngineUnavailableError:
            log.info("no engine is there to invalidate anything in")

    async def _freed(self, cause: InvalidationCause) -> int | None:
        """Blocks that the engines have dropped for this cause so far; None if one does not say."""
        try:
            reports = await self._pool.cache_reports()
        except EngineUnavailableError:
            return None
        if len(reports) < len(self._pool.engines):
            return None
        return sum(_blocks(report, cause) for report in reports.values())

    async def _heard(self, announcement: CachesInvalidated) -> None:
        if announcement.newest > self._applied:
            try:
                await self.follow()
            except DatabaseUnavailable as error:
                log.warning("invalidations are followed later: %s", error)


def _check(command: Invalidate) -> None:
    for name in ("base_digest", "adapter_digest", "template_digest"):
        value = getattr(command, name)
        if value is not None and (len(value) > DIGEST_LENGTH or not value.isprintable()):
            raise InvalidRequest(f"{name} is no digest", param=name)
    owner = command.owner
    if owner is not None and (len(owner.name) > NAME_LENGTH or not owner.name.isprintable()):
        raise InvalidRequest("no owner has such a name", param="owner.name")


def _blocks(report: CacheReport, cause: InvalidationCause) -> int:
    return sum(namespace.invalidations.get(cause, 0) for namespace in report.namespaces)


def _owner(row: PrefixInvalidationRow) -> CacheOwner | None:
    if row.owner_kind is None or row.owner_name is None:
        return None
    return CacheOwner(cast(Literal["tenant", "group"], row.owner_kind), row.owner_name)


def _command(row: PrefixInvalidationRow) -> Invalidate:
    return Invalidate(
        cause=msgspec.convert(row.cause, InvalidationCause),
        owner=_owner(row),
        base_digest=row.base_digest,
        adapter_digest=row.adapter_digest,
        template_digest=row.template_digest,
    )


def invalidation_view(row: PrefixInvalidationRow) -> InvalidationView:
    """Needs nothing loaded beside the row."""
    return InvalidationView(
        id=row.id,
        cause=msgspec.convert(row.cause, InvalidationCause),
        owner=_owner(row),
        base_digest=row.base_digest,
        adapter_digest=row.adapter_digest,
        template_digest=row.template_digest,
        author=row.author,
        blocks_freed=row.blocks_freed,
        created_at=row.created_at,
    )
