"""Prefixes that tenants want warm, in every engine, over restarts of engines and servers.

The record says what is wanted, the engines say what they hold, and a look makes up the difference.
A prefix whose model leads to another revision now is another prefix: the new one is warmed, the old
one released.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError

from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import TenantRow
from polyloom.platform.db.prefix_models import PrefixHoldRow
from polyloom.platform.engine.errors import EngineRefusedError, EngineUnavailableError
from polyloom.platform.engine.messages import CacheReport, Finished, Status, Tokens
from polyloom.platform.errors import (
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    PlatformError,
    QuotaExceeded,
)
from polyloom.platform.generation.held_prefixes import HeldRequest
from polyloom.platform.periodic import Periodic
from polyloom.platform.services.audit import note
from polyloom.platform.services.prefix_views import HoldView
from polyloom.platform.services.rows import tenant_view
from polyloom.platform.services.views import TenantView
from polyloom.routing.errors import RoutingError
from polyloom.routing.names import is_name
from polyloom.routing.request import GenerationRequest

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
HOLDS_PER_TENANT = 16
TENANT_SHARE = 8
"""A tenant holds at most one part in so many of an engine's KV tokens."""
NO_CACHES = "this server runs with prefix-cache set to false: nothing can be held"


class HoldingEngine(Protocol):
    """What is needed of one engine."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Tokens | Finished]: ...
    async def release_prefix(self, hold: str) -> None: ...


class HoldingPool(Protocol):
    """What is needed of all engines."""

    @property
    def engines(self) -> Sequence[HoldingEngine]: ...
    @property
    def last_status(self) -> Status | None: ...
    @property
    def block_size(self) -> int: ...
    async def cache_reports(self) -> dict[int, CacheReport]: ...


class Planner(Protocol):
    """`HoldPlanner`."""

    async def plan(self, tenant: TenantView, hold: int, held: HeldRequest) -> GenerationRequest: ...


@dataclass(frozen=True)
class _Wanted:
    """A row, and the request that warms it; or why there is none."""

    row: PrefixHoldRow
    tenant: TenantView
    request: GenerationRequest | None = None
    failure: str | None = None


class PrefixHolds:
    """Adds, lists and ends holds, and keeps them warm."""

    def __init__(
        self, database: Database, pool: HoldingPool, planner: Planner, *, caching: bool
    ) -> None:
        """caching: the engines have prefix caches; without, what is wanted stays cold."""
        self._database = database
        self._pool = pool
        self._planner = planner
        self._caching = caching
        self._warming = asyncio.Lock()
        self._looker = Periodic(self.look, LOOK_SECONDS)

    def start(self) -> None:
        """Look every few seconds."""
        self._looker.start()

    async def stop(self) -> None:
        """Stop looking; the engines are about to end."""
        await self._looker.stop()

    async def add(
        self, tenant: TenantView, name: str, held: HeldRequest, *, author: str
    ) -> HoldView:
        """Record, warm everywhere, and answer.

        Raises InvalidRequest (name, or what is held), Conflict (the name is taken, or there are no
        prefix caches), QuotaExceeded (the tenant's or the engines' room), EngineUnavailable,
        RoutingError.
        """
        if not self._caching:
            raise Conflict(NO_CACHES)
        if not is_name(name):
            raise InvalidRequest(f"{name!r} cannot name a prefix", param="name")
        plan = await self._planner.plan(tenant, 0, held)
        row = PrefixHoldRow(
            tenant_id=tenant.id,
            name=name,
            request=msgspec.json.encode(held).decode(),
            tokens=len(plan.prompt),
            author=author,
        )
        await self._insert(tenant, row, author)
        try:
            wanted = await self._plan(row, tenant)
            async with self._warming:
                await self._warm([wanted], await self._reports())
        except (QuotaExceeded, EngineUnavailable):
            await self.end(tenant, name, author=author)
            raise
        return (await self._views([row]))[0]

    async def list(self, tenant: TenantView) -> tuple[HoldView, ...]:
        """By name. Raises DatabaseUnavailable."""
        statement = select(PrefixHoldRow).filter_by(tenant_id=tenant.id)
        async with self._database.read() as session:
            rows = (await session.scalars(statement.order_by(PrefixHoldRow.name))).all()
        return await self._views(rows)

    async def end(self, tenant: TenantView, name: str, *, author: str) -> None:
        """Let its blocks be evicted. Raises NotFound."""
        async with self._database.write() as session:
            row = await session.scalar(
                select(PrefixHoldRow).filter_by(tenant_id=tenant.id, name=name)
            )
            if row is None:
                raise NotFound(f"no held prefix {name!r}")
            await session.delete(row)
            note(session, author=author, action="prefix.release", target=name, tenant_id=tenant.id)
        await self._release_all_of(row.id)

    async def end_all(self, tenant: TenantView, *, author: str) -> int:
        """Every hold of the tenant; how many there were. Raises DatabaseUnavailable."""
        holds = await self.list(tenant)
        async with self._database.write() as session:
            await session.execute(delete(PrefixHoldRow).filter_by(tenant_id=tenant.id))
            if holds:
                note(
                    session,
                    author=author,
                    action="prefix.release_all",
                    target=tenant.slug,
                    tenant_id=tenant.id,
                )
        await self.look()
        return len(holds)

    async def look(self) -> None:
        """Warm what is wanted and cold, release what is held and not wanted. Raises
        DatabaseUnavailable."""
        if not self._caching:
            return
        async with self._warming:
            statement = select(PrefixHoldRow, TenantRow).join(
                TenantRow, TenantRow.id == PrefixHoldRow.tenant_id
            )
            async with self._database.read() as session:
                rows = (await session.execute(statement.order_by(PrefixHoldRow.id))).all()
            try:
                reports = await self._reports()
            except EngineUnavailable:
                return
            if not rows and not any(report.holds for report in reports.values()):
                return
            wanted = [
                await self._plan(row, tenant_view(tenant))
                for row, tenant in rows
                if tenant.state == "active"
            ]
            await self._release(reports, {w.request.hold for w in wanted if w.request})
            with contextlib.suppress(QuotaExceeded, EngineUnavailable):
                await self._warm(wanted, reports)

    async def _insert(self, tenant: TenantView, row: PrefixHoldRow, author: str) -> None:
        try:
            async with self._database.write() as session:
                held, tokens = (
                    await session.execute(
                        select(
                            func.count(), func.coalesce(func.sum(PrefixHoldRow.tokens), 0)
                        ).where(PrefixHoldRow.tenant_id == tenant.id)
                    )
                ).one()
                self._check_quota(held, tokens + row.tokens)
                session.add(row)
                note(
                    session,
                    author=author,
                    action="prefix.hold",
                    target=row.name,
                    tenant_id=tenant.id,
                )
        except IntegrityError as error:
            raise Conflict(f"a prefix {row.name!r} is held already", param="name") from error

    def _check_quota(self, held: int, tokens: int) -> None:
        if held >= HOLDS_PER_TENANT:
            raise QuotaExceeded(f"a tenant holds at most {HOLDS_PER_TENANT} prefixes")
        status = self._pool.last_status
        if status is not None:
            room = status.blocks_total * self._pool.block_size // TENANT_SHARE
            if tokens > room:
                raise QuotaExceeded(
                    f"all held prefixes would have {tokens} tokens; a tenant holds at most {room}"
                )

    async def _reports(self) -> Mapping[int, CacheReport]:
        try:
            return await self._pool.cache_reports()
        except EngineUnavailableError as error:
            raise EngineUnavailable(str(error), retry_after=error.retry_after) from error

    async def _plan(self, row: PrefixHoldRow, tenant: TenantView) -> _Wanted:
        held = msgspec.json.decode(row.request, type=HeldRequest)
        try:
            return _Wanted(row, tenant, await self._planner.plan(tenant, row.id, held))
        except (PlatformError, RoutingError) as error:
            return _Wanted(row, tenant, failure=str(error))

    async def _warm(self, wanted: Sequence[_Wanted], reports: Mapping[int, CacheReport]) -> None:
        """Prefill what an engine does not hold; one after the other, as they take the place of
        requests. Raises the last QuotaExceeded or EngineUnavailable, after all were tried."""
        problem: PlatformError | None = None
        for one in wanted:
            failure = one.failure
            for index, report in reports.items():
                if one.request is not None and one.request.hold not in report.holds:
                    try:
                        await _prefill(self._pool.engines[index], one.request)
                    except (QuotaExceeded, EngineUnavailable) as error:
                        failure, problem = error.message, error
            await self._note_state(one, failure)
        if problem is not None:
            raise problem

    async def _note_state(self, one: _Wanted, failure: str | None) -> None:
        tokens = one.row.tokens if one.request is None else len(one.request.prompt)
        if (failure, tokens) == (one.row.failure, one.row.tokens):
            return
        async with self._database.write() as session:
            await session.execute(
                update(PrefixHoldRow)
                .where(PrefixHoldRow.id == one.row.id)
                .values(failure=failure, tokens=tokens)
            )
        one.row.failure, one.row.tokens = failure, tokens

    async def _release(
        self, reports: Mapping[int, CacheReport], wanted: Collection[str | None]
    ) -> None:
        for index, report in reports.items():
            for hold in report.holds:
                if hold not in wanted:
                    with contextlib.suppress(EngineUnavailableError):
                        await self._pool.engines[index].release_prefix(hold)

    async def _release_all_of(self, row_id: int) -> None:
        with contextlib.suppress(EngineUnavailable):
            reports = await self._reports()
            keep = {
                hold
                for report in reports.values()
                for hold in report.holds
                if not hold.startswith(f"hold-{row_id}-")
            }
            await self._release(reports, keep)

    async def _views(self, rows: Sequence[PrefixHoldRow]) -> tuple[HoldView, ...]:
        reports: Mapping[int, CacheReport] = {}
        with contextlib.suppress(EngineUnavailable):
            reports = await self._reports()
        failure = None if self._caching else NO_CACHES
        return tuple(_view(row, reports, len(self._pool.engines), failure) for row in rows)


async def _prefill(engine: HoldingEngine, request: GenerationRequest) -> None:
    """Raises QuotaExceeded if the engine has no room to hold it, EngineUnavailable."""
    request = msgspec.structs.replace(request, sequence_id="hold_" + uuid.uuid4().hex)
    try:
        async with contextlib.aclosing(engine.generate(request)) as events:
            async for event in events:
                if isinstance(event, Finished) and event.reason not in ("length", "stop"):
                    raise EngineUnavailable(event.error or f"the prefill ended: {event.reason}")
    except EngineRefusedError as error:
        raise QuotaExceeded(f"the engine does not hold it: {error}") from error
    except EngineUnavailableError as error:
        raise EngineUnavailable(str(error), retry_after=error.retry_after) from error


def _view(
    row: PrefixHoldRow, reports: Mapping[int, CacheReport], engines: int, failure: str | None
) -> HoldView:
    """failure: of all prefixes, before the row's own."""
    mine = f"hold-{row.id}-"
    holding = sum(any(h.startswith(mine) for h in report.holds) for report in reports.values())
    return HoldView(
        name=row.name,
        model=msgspec.json.decode(row.request, type=HeldRequest).model,
        tokens=row.tokens,
        engines=holding,
        engines_total=engines,
        failure=failure or row.failure,
        author=row.author,
        created_at=row.created_at,
    )
