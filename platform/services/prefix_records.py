"""What prefix caches gave, kept in the record across engine processes.

An engine reports absolute counters of its own life. They are written as such, under the boot's id:
writing one report twice, from several API processes or in the wrong order, changes nothing. Rows of
boots that are long silent are folded into one sum a namespace.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Literal, TypeVar, cast

from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.platform.clock import Clock, system_clock, utc
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import Record
from polyloom.platform.db.prefix_models import (
    NO_ADAPTER,
    PAST,
    PrefixBootRow,
    PrefixCounterRow,
    PrefixNamespaceRow,
)
from polyloom.platform.engine.messages import (
    CacheReport,
    InvalidationCause,
    MissReason,
    NamespaceCounters,
)
from polyloom.routing.request import CacheOwner

FOLD_AFTER = timedelta(hours=1)
FORGET_AFTER = timedelta(days=7)
NUMBERS = ("eligible", "hits", "tokens_reused", "bytes_reused", "saved", "evictions")
BY_NAME = ("invalidations", "misses")

Name = TypeVar("Name", bound=str)
Identity = tuple[str, str, str, str]
"""Columns of a namespace's row: owner's kind and name, base, adapter."""


class PrefixRecords:
    """Writes engines' reports, and sums them."""

    def __init__(self, database: Database, *, clock: Clock = system_clock) -> None:
        self._database = database
        self._clock = clock
        self._written: dict[str, dict[Identity, NamespaceCounters]] = {}

    async def absorb(self, reports: Sequence[CacheReport]) -> None:
        """Record what engines report now. Raises DatabaseUnavailable."""
        for report in reports:
            news = {identity_of(n): n for n in report.namespaces}
            known = self._written.get(report.boot, {})
            fresh = {key: n for key, n in news.items() if not _same(n, known.get(key))}
            if not known or fresh:
                await self._write(report.boot, fresh)
        self._written = {r.boot: {identity_of(n): n for n in r.namespaces} for r in reports}

    async def keep(self, boots: Iterable[str]) -> None:
        """Say that these engine processes live, and fold those that nobody spoke of for
        `FOLD_AFTER`. Raises DatabaseUnavailable."""
        now = utc(self._clock)
        async with self._database.write() as session:
            for boot in sorted(boots):
                row = await _boot(session, boot, lock=True)
                if row is not None:
                    row.seen_at = now
            silent = await session.scalars(
                select(PrefixBootRow)
                .where(PrefixBootRow.seen_at < now - FOLD_AFTER, ~PrefixBootRow.folded)
                .order_by(PrefixBootRow.boot)
                .with_for_update(key_share=True, skip_locked=True)
            )
            for row in silent.all():
                await _fold(session, row.boot)
                row.folded = True
            await session.execute(
                delete(PrefixBootRow).where(
                    PrefixBootRow.folded, PrefixBootRow.seen_at < now - FORGET_AFTER
                )
            )

    async def totals(self, owner: CacheOwner | None = None) -> tuple[NamespaceCounters, ...]:
        """Sums over all engine processes, one a namespace (of `owner` if given), `blocks` and
        `held_blocks` 0: those are of this moment. Raises DatabaseUnavailable."""
        statement = (
            select(PrefixNamespaceRow, PrefixCounterRow)
            .join(PrefixCounterRow, PrefixCounterRow.namespace_id == PrefixNamespaceRow.id)
            .order_by(PrefixNamespaceRow.id, PrefixCounterRow.id)
        )
        if owner is not None:
            statement = statement.where(
                PrefixNamespaceRow.owner_kind == owner.kind,
                PrefixNamespaceRow.owner_name == owner.name,
            )
        sums: dict[int, NamespaceCounters] = {}
        async with self._database.read() as session:
            for namespace, row in await session.execute(statement):
                counted = _counters(namespace, row)
                known = sums.get(namespace.id)
                sums[namespace.id] = counted if known is None else add(known, counted)
        return tuple(sums.values())

    async def _write(self, boot: str, fresh: dict[Identity, NamespaceCounters]) -> None:
        async with self._database.write() as session:
            await _ensure(session, PrefixBootRow, {"boot": boot, "seen_at": utc(self._clock)})
            row = await _boot(session, boot, lock=True)
            if row is None or row.folded:
                return
            row.seen_at = utc(self._clock)
            for identity, counters in sorted(fresh.items()):
                namespace = await _namespace(session, identity)
                _raise_to(await _row(session, namespace, boot), counters)


def identity_of(counters: NamespaceCounters) -> Identity:
    """The namespace's row that these counters belong to."""
    owner = counters.owner
    return (owner.kind, owner.name, counters.base_digest, counters.adapter_digest or NO_ADAPTER)


def add(one: NamespaceCounters, other: NamespaceCounters) -> NamespaceCounters:
    """Both together, under the namespace of `one`."""
    return NamespaceCounters(
        owner=one.owner,
        base_digest=one.base_digest,
        adapter_digest=one.adapter_digest,
        eligible=one.eligible + other.eligible,
        hits=one.hits + other.hits,
        tokens_reused=one.tokens_reused + other.tokens_reused,
        bytes_reused=one.bytes_reused + other.bytes_reused,
        saved=one.saved + other.saved,
        evictions=one.evictions + other.evictions,
        invalidations=_added(one.invalidations, other.invalidations),
        misses=_added(one.misses, other.misses),
        blocks=one.blocks + other.blocks,
        held_blocks=one.held_blocks + other.held_blocks,
    )


def _added(one: dict[Name, int], other: dict[Name, int]) -> dict[Name, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in sorted({*one, *other})}


def _same(one: NamespaceCounters, other: NamespaceCounters | None) -> bool:
    return other is not None and all(
        getattr(one, name) == getattr(other, name) for name in (*NUMBERS, *BY_NAME)
    )


def _counters(namespace: PrefixNamespaceRow, row: PrefixCounterRow) -> NamespaceCounters:
    return NamespaceCounters(
        owner=CacheOwner(
            cast(Literal["tenant", "group"], namespace.owner_kind), namespace.owner_name
        ),
        base_digest=namespace.base_digest,
        adapter_digest=namespace.adapter_digest or None,
        eligible=row.eligible,
        hits=row.hits,
        tokens_reused=row.tokens_reused,
        bytes_reused=row.bytes_reused,
        saved=row.saved,
        evictions=row.evictions,
        invalidations=cast(dict[InvalidationCause, int], dict(row.invalidations)),
        misses=cast(dict[MissReason, int], dict(row.misses)),
        blocks=0,
        held_blocks=0,
    )


def _raise_to(row: PrefixCounterRow, counters: NamespaceCounters) -> None:
    """Counters only grow: of two reports the larger is the later."""
    for name in NUMBERS:
        setattr(row, name, max(getattr(row, name), getattr(counters, name)))
    for name in BY_NAME:
        known, news = getattr(row, name), getattr(counters, name)
        names = sorted({*known, *news})
        setattr(row, name, {key: max(known.get(key, 0), news.get(key, 0)) for key in names})


async def _fold(session: AsyncSession, boot: str) -> None:
    """Add a boot's rows to the sum of the past, and drop them."""
    rows = await session.scalars(select(PrefixCounterRow).where(PrefixCounterRow.boot == boot))
    for row in sorted(rows.all(), key=lambda row: row.namespace_id):
        past = await _row(session, row.namespace_id, PAST, lock=True)
        for name in NUMBERS:
            setattr(past, name, getattr(past, name) + getattr(row, name))
        for name in BY_NAME:
            setattr(past, name, _added(getattr(past, name), getattr(row, name)))
        await session.delete(row)


async def _boot(session: AsyncSession, boot: str, *, lock: bool) -> PrefixBootRow | None:
    statement = select(PrefixBootRow).where(PrefixBootRow.boot == boot)
    return await session.scalar(statement.with_for_update(key_share=True) if lock else statement)


async def _namespace(session: AsyncSession, identity: Identity) -> int:
    columns = ("owner_kind", "owner_name", "base_digest", "adapter_digest")
    values = dict(zip(columns, identity, strict=True))
    statement = select(PrefixNamespaceRow.id).filter_by(**values)
    found = await session.scalar(statement)
    if found is None:
        await _ensure(session, PrefixNamespaceRow, values)
        found = (await session.scalars(statement)).one()
    return found


async def _row(
    session: AsyncSession, namespace: int, boot: str, *, lock: bool = False
) -> PrefixCounterRow:
    statement = select(PrefixCounterRow).filter_by(namespace_id=namespace, boot=boot)
    if lock:
        statement = statement.with_for_update()
    found = await session.scalar(statement)
    if found is None:
        await _ensure(session, PrefixCounterRow, {"namespace_id": namespace, "boot": boot})
        found = (await session.scalars(statement)).one()
    return found


async def _ensure(session: AsyncSession, kind: type[Record], values: Mapping[str, object]) -> None:
    """Insert the row unless it is there already, whoever else does the same."""
    dialect = session.get_bind().dialect.name
    if dialect == "postgresql":
        await session.execute(postgresql.insert(kind).values(**values).on_conflict_do_nothing())
    else:
        await session.execute(sqlite.insert(kind).values(**values).on_conflict_do_nothing())
