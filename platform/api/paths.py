"""Names in paths: an adapter's name may hold `/`, which a client writes as `%2F`."""

from urllib.parse import unquote

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from polyloom.platform.errors import NotFound


class EncodedPaths:
    """Routes by the path as it was sent, so that an encoded `/` does not divide it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on, its path still encoded."""
        if scope["type"] == ScopeType.HTTP:
            scope["path"] = scope["raw_path"].decode("ascii", errors="replace")
        await self._app(scope, receive, send)


def name_in_path(part: str) -> str:
    """The name that a path parameter stands for. Raises NotFound for one that nothing can have:
    PostgreSQL cannot even be asked for a name with a NUL."""
    name = unquote(part)
    if "\0" in name:
        raise NotFound(f"nothing is called {name!r}")
    return name
