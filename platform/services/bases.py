"""Bases: which base models this record knows."""

from collections.abc import Awaitable, Callable

from sqlalchemy import select

from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import BaseRow
from polyloom.platform.db.repositories import BaseRepository, RouteVersionRepository
from polyloom.platform.errors import InvalidRequest, NotFound
from polyloom.platform.services.audit import note
from polyloom.platform.services.rows import base_view
from polyloom.platform.services.views import BaseView
from polyloom.routing.names import is_name


class BaseService:
    """Registers bases when a server starts with one."""

    def __init__(self, database: Database, routes_changed: Callable[[], Awaitable[None]]) -> None:
        self._database = database
        self._routes_changed = routes_changed

    async def register(
        self, *, name: str, digest: str, folder: str, template_digest: str, config: str
    ) -> BaseView:
        """Record a base, or the new name, folder and template of one whose digest is known.

        name: what clients send as `model`; another digest may have had it before.  config: the text
        of its config.json.  Raises InvalidRequest (name).
        """
        if not is_name(name):
            raise InvalidRequest(f"{name!r} cannot name a base", param="base")
        async with self._database.write() as session:
            # The version's lock is what two servers that start at once wait on.
            await RouteVersionRepository(session).advance()
            row = await session.scalar(select(BaseRow).where(BaseRow.digest == digest))
            before = None if row is None else base_view(row)
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
