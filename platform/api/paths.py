"""Names in paths: an adapter's name may hold `/`, which a client writes as `%2F`."""

from urllib.parse import unquote

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send


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
    """The name that a path parameter stands for."""
    return unquote(part)
