"""Who is calling, and whether they may."""

from collections.abc import Awaitable, Callable
from typing import Any

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.handlers.base import BaseRouteHandler

from polyloom.platform.errors import InsufficientScope, InvalidApiKey
from polyloom.platform.services.keys import KeyService
from polyloom.platform.services.views import Principal, Scope, TenantView

Connection = ASGIConnection[Any, Any, Any, Any]
Guard = Callable[[Connection, BaseRouteHandler], Awaitable[None]]
AuthorizedRequest = Request[None, Principal, State]
"""A request behind a guard: `request.auth` is its principal."""


def requires(*scopes: Scope) -> Guard:
    """A guard that admits keys with one of `scopes`; `request.auth` is the principal from then
    on."""

    async def guard(connection: Connection, _: BaseRouteHandler) -> None:
        keys: KeyService = connection.app.state.assembly.keys
        principal = await keys.authenticate(bearer_key(connection))
        if principal.scopes.isdisjoint(scopes):
            raise InsufficientScope(f"this key lacks the scope {' or '.join(map(repr, scopes))}")
        connection.scope["auth"] = principal

    return guard


def bearer_key(connection: Connection) -> str:
    """The key in `Authorization: Bearer …`. Raises InvalidApiKey."""
    kind, _, key = connection.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not key.strip():
        raise InvalidApiKey("send your key as `Authorization: Bearer <key>`")
    return key.strip()


def tenant_of(principal: Principal) -> TenantView:
    """The tenant of a tenant's key. Raises InsufficientScope for the operator's key."""
    if principal.tenant is None:
        raise InsufficientScope("the admin key belongs to no tenant; use a tenant's key")
    return principal.tenant
