"""Bases: which base models this record knows."""

from collections.abc import Awaitable, Callable

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import BaseRow
from polyloom.platform.db.repositories import BaseRepository, RouteVersionRepository
from polyloom.platform.engine.messages import Invalidate
from polyloom.platform.errors import InvalidRequest, NotFound
from polyloom.platform.services.audit import note
from polyloom.platform.services.rows import base_view
from polyloom.platform.services.views import BaseView
from polyloom.routing.names import is_name


class BaseService:
    """Registers bases when a server starts with one."""

    def __init__(
        self,
        database: Database,
        routes_changed: Callable[[], Awaitable[None]],
        invalidate: Callable[[Invalidate], Awaitable[None]],
    ) -> None:
        """invalidate: called for caches of what a base replaces."""
        self._database = database
        self._routes_changed = routes_changed
        self._invalidate = invalidate

    async def register(
        self, *, name: str, digest: str, folder: str, template_digest: str, config: str
    ) -> BaseView:
        """Record a base, or the new name, folder and template of one whose digest is known.

        name: what clients send as `model`; another digest may have had it before: what is cached of
        that one is invalidated, and what is cached under the template that this one had.  config:
        the text of its config.json.  Raises InvalidRequest (name).
        """
        if not is_name(name):
            raise InvalidRequest(f"{name!r} cannot name a base", param="base")
        async with self._database.write() as session:
            # The version's lock is what two servers that start at once wait on.
            await RouteVersionRepository(session).advance()
            row = await session.scalar(select(BaseRow).where(BaseRow.digest == digest))
            before = None if row is None else base_view(row)
            replaced = await _earlier_of_the_name(session, before, name, digest)
            if row is None:
                row = BaseRow(digest=digest)
            row.name, row.folder = name, folder
            row.template_digest, row.config = template_digest, config
            await BaseRepository(session).add(row)
            view = base_view(row)
            if view != before:
                note(
                    session,
                    author="server",
                    action="base.register",
                    target=name,
                    before=before,
                    after=view,
                )
        await self._routes_changed()
        for earlier in replaced:
            await self._invalidate(Invalidate(cause="base_changed", base_digest=earlier))
        if before is not None and before.template_digest != template_digest:
            await self._invalidate(
                Invalidate(
                    cause="template_changed",
                    base_digest=digest,
                    template_digest=before.template_digest,
                )
            )
        return view

    async def get(self, digest: str) -> BaseView:
        """Raises NotFound."""
        async with self._database.read() as session:
            row = await session.scalar(select(BaseRow).where(BaseRow.digest == digest))
        if row is None:
            raise NotFound(f"no base has the digest {digest}")
        return base_view(row)

    async def list(self) -> tuple[BaseView, ...]:
        """All bases by name."""
        async with self._database.read() as session:
            rows = await session.scalars(select(BaseRow).order_by(BaseRow.name))
            return tuple(base_view(row) for row in rows)


async def _earlier_of_the_name(
    session: AsyncSession, before: BaseView | None, name: str, digest: str
) -> tuple[str, ...]:
    """Digests whose name goes to a base that did not have it."""
    if before is not None and before.name == name:
        return ()
    named = select(BaseRow.digest).where(BaseRow.name == name, BaseRow.digest != digest)
    return tuple(await session.scalars(named.order_by(BaseRow.id)))
