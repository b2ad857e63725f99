"""Aliases: movable names on an adapter. Every move is a row, so going back is choosing one.

An alias keeps pointing at a revision that is retired: requests then say `revision_retired`, and the
history stays true. It can only be moved to a revision that is ready.
"""

from collections.abc import Awaitable, Callable
from datetime import datetime

from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.platform.clock import Clock, system_clock, utc
from polyloom.platform.db.bounds import check_text
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import AdapterRow, AliasChangeRow, AliasRow, RevisionRow
from polyloom.platform.db.repositories import (
    AdapterRepository,
    AliasRepository,
    RevisionRepository,
    RouteVersionRepository,
)
from polyloom.platform.errors import Conflict, InvalidRequest, NotFound
from polyloom.platform.services.audit import note
from polyloom.platform.services.rows import alias_change_view, alias_view
from polyloom.platform.services.views import AliasChangeView, AliasView
from polyloom.routing.names import is_alias

Requirement = Callable[[AsyncSession], Awaitable[None]]


def check_alias(alias: str) -> None:
    """Raises InvalidRequest unless `alias` may be one."""
    if not is_alias(alias):
        raise InvalidRequest(
            f"{alias!r} cannot be an alias: letters, digits and ._:/- only, no number and no digest",
            param="alias",
        )


def not_ready(number: int, state: str) -> Conflict:
    """The refusal of an alias on a revision that is not served."""
    return Conflict(
        f"revision {number} is {state}: an alias points at a ready one", param="revision"
    )


async def record_move(
    session: AsyncSession,
    adapter: AdapterRow,
    alias: str,
    revision: RevisionRow,
    *,
    author: str,
    now: datetime,
    reason: str | None = None,
    restores: int | None = None,
) -> AliasView:
    """Point `alias` at `revision` within `session`; the adapter must be locked. An alias that points
    there already is left alone, unless it is being rolled back. Raises Conflict."""
    if revision.state != "ready":
        raise not_ready(revision.number, revision.state)
    row = await AliasRepository(session).named(adapter.id, alias)
    present = None if row is None else row.changes[0]
    if row is not None and present is not None:
        if present.revision_id == revision.id and restores is None:
            return alias_view(row, adapter.name, present)
        row.version = present.version + 1
    else:
        row = AliasRow(adapter_id=adapter.id, name=alias, version=1)
        await AliasRepository(session).add(row)
    change = AliasChangeRow(
        alias_id=row.id,
        version=row.version,
        revision=revision,
        author=author,
        reason=reason,
        restores=restores,
        created_at=now,
    )
    session.add(change)
    note(
        session,
        author=author,
        action="alias.rollback" if restores is not None else "alias.move",
        target=f"{adapter.name}@{alias}",
        tenant_id=adapter.tenant_id,
        before=None if present is None else present.revision.number,
        after=revision.number,
    )
    adapter.route_version = await RouteVersionRepository(session).advance()
    return alias_view(row, adapter.name, change)


class AliasService:
    """Moves aliases, takes them back and tells their history."""

    def __init__(
        self,
        database: Database,
        routes_changed: Callable[[], Awaitable[None]],
        *,
        clock: Clock = system_clock,
    ) -> None:
        """routes_changed: called after each committed move."""
        self._database = database
        self._routes_changed = routes_changed
        self._clock = clock

    async def move(
        self,
        tenant_id: int,
        adapter: str,
        alias: str,
        number: int,
        *,
        author: str,
        reason: str | None = None,
        require: Requirement | None = None,
    ) -> AliasView:
        """Point the alias at revision `number`, creating it if need be.

        require: has the last word, within the move's transaction.  Raises InvalidRequest (alias,
        reason), NotFound, Conflict (the revision is not ready), and what `require` raises.
        """
        check_alias(alias)
        check_text("reason", reason)
        async with self._database.write() as session:
            owner = await _locked(session, tenant_id, adapter)
            revision = await RevisionRepository(session).numbered(owner.id, number)
            if revision is None:
                raise NotFound(f"the adapter {adapter!r} has no revision {number}")
            if require is not None:
                await require(session)
            view = await record_move(
                session,
                owner,
                alias,
                revision,
                author=author,
                reason=reason,
                now=utc(self._clock),
            )
        await self._routes_changed()
        return view

    async def rollback(
        self,
        tenant_id: int,
        adapter: str,
        alias: str,
        *,
        author: str,
        reason: str | None = None,
    ) -> AliasView:
        """Back to the revision before the present one; again: one further back. Revisions that are
        not ready any more are passed over. Raises InvalidRequest (reason), NotFound, Conflict
        (nothing to go back to)."""
        check_text("reason", reason)
        async with self._database.write() as session:
            owner = await _locked(session, tenant_id, adapter)
            row = await _alias(session, owner, alias)
            target = _older(row.changes)
            if target is None:
                raise Conflict(
                    f"the alias {alias!r} of {adapter!r} has pointed at no older revision that is"
                    " ready",
                    param="alias",
                )
            view = await record_move(
                session,
                owner,
                alias,
                target.revision,
                author=author,
                reason=reason,
                restores=target.version,
                now=utc(self._clock),
            )
        await self._routes_changed()
        return view

    async def get(self, tenant_id: int, adapter: str, alias: str) -> AliasView:
        """Raises NotFound."""
        async with self._database.read() as session:
            owner = await _found(session, tenant_id, adapter)
            row = await _alias(session, owner, alias)
            return alias_view(row, adapter, row.changes[0])

    async def history(
        self, tenant_id: int, adapter: str, alias: str
    ) -> tuple[AliasChangeView, ...]:
        """Every move, newest first. Raises NotFound."""
        async with self._database.read() as session:
            owner = await _found(session, tenant_id, adapter)
            row = await _alias(session, owner, alias)
            return tuple(alias_change_view(change) for change in row.changes)


def _older(changes: list[AliasChangeRow]) -> AliasChangeRow | None:
    """The change to restore: the newest before the one in force that pointed elsewhere, at what is
    still ready. A rollback in force counts as the change it restored, so a second one goes further
    back, not forth again. `changes` is newest first."""
    present = changes[0]
    in_force = present.version if present.restores is None else present.restores
    for change in changes:
        before = change.version < in_force and change.restores is None
        other = change.revision_id != present.revision_id
        if before and other and change.revision.state == "ready":
            return change
    return None


async def _locked(session: AsyncSession, tenant_id: int, adapter: str) -> AdapterRow:
    row = await AdapterRepository(session).lock(tenant_id, adapter)
    if row is None:
        raise NotFound(f"no adapter {adapter!r}")
    return row


async def _found(session: AsyncSession, tenant_id: int, adapter: str) -> AdapterRow:
    row = await AdapterRepository(session).named(tenant_id, adapter)
    if row is None:
        raise NotFound(f"no adapter {adapter!r}")
    return row


async def _alias(session: AsyncSession, adapter: AdapterRow, alias: str) -> AliasRow:
    row = await AliasRepository(session).named(adapter.id, alias)
    if row is None:
        raise NotFound(f"the adapter {adapter.name!r} has no alias {alias!r}")
    return row
