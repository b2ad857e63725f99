"""The web application: routes, errors and the objects that handlers are given."""

import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager

from litestar import Litestar
from litestar.datastructures import MutableScopeHeaders, State
from litestar.di import Provide
from litestar.types import ControllerRouterHandler, Message, Scope

from polyloom.platform.api.adapters import ADAPTER_ROUTES
from polyloom.platform.api.admin import ADMIN_ROUTES
from polyloom.platform.api.cache import CACHE_ROUTES
from polyloom.platform.api.chat import create_chat_completion
from polyloom.platform.api.completions import create_completion
from polyloom.platform.api.draft_heads import DRAFT_HEAD_ROUTES
from polyloom.platform.api.models import get_model, list_models
from polyloom.platform.api.openapi import describe_bodies, openapi_config
from polyloom.platform.api.operations import OPERATION_ROUTES
from polyloom.platform.api.paths import EncodedPaths
from polyloom.platform.api.prefixes import PREFIX_ROUTES
from polyloom.platform.api.problems import answer_problem
from polyloom.platform.api.routes import ROUTE_ROUTES
from polyloom.platform.api.shares import SHARE_ROUTES
from polyloom.platform.api.speculation import SPECULATION_ROUTES
from polyloom.platform.api.usage import own_usage
from polyloom.platform.assembly import Assembly
from polyloom.platform.settings import Settings

MAX_BODY_BYTES = 8 << 20
"""Of any body but an upload's: parsing it stops the event loop for a fraction of a second."""

ROUTES: list[ControllerRouterHandler] = [
    create_chat_completion,
    create_completion,
    list_models,
    get_model,
    own_usage,
    *ADAPTER_ROUTES,
    *DRAFT_HEAD_ROUTES,
    *ROUTE_ROUTES,
    *SHARE_ROUTES,
    *ADMIN_ROUTES,
    *CACHE_ROUTES,
    *SPECULATION_ROUTES,
    *PREFIX_ROUTES,
    *OPERATION_ROUTES,
]
PROVIDED = (
    "aliases",
    "audit",
    "base",
    "draft_heads",
    "engine",
    "fleet",
    "gates",
    "head_onboarding",
    "holds",
    "inference",
    "invalidations",
    "keys",
    "metrics",
    "onboarding",
    "prefix_accounts",
    "promotion",
    "registry",
    "retirement",
    "routes",
    "shares",
    "snapshots",
    "tenants",
    "usage",
)
"""Attributes of the assembly that handlers are given by name."""

Lifespan = Callable[[Litestar], AbstractAsyncContextManager[None]]


def create_app(settings: Settings) -> Litestar:
    """An application that starts everything it needs on startup and ends it on shutdown."""
    assembly = Assembly(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncGenerator[None, None]:
        async with assembly.running():
            yield

    return build_app(assembly, lifespan)


def build_app(assembly: Assembly, *lifespan: Lifespan) -> Litestar:
    """The application over objects that run, or that `lifespan` starts before the first request."""
    app = Litestar(
        route_handlers=ROUTES,
        dependencies={name: _provide(assembly, name) for name in PROVIDED},
        exception_handlers={Exception: answer_problem},
        before_send=[_name_request],
        lifespan=lifespan,
        state=State({"assembly": assembly}),
        openapi_config=openapi_config(),
        request_max_body_size=MAX_BODY_BYTES,
        logging_config=None,
        debug=False,
    )
    describe_bodies(app.openapi_schema)
    app.asgi_handler = EncodedPaths(app.asgi_handler)
    return app


def _provide(assembly: Assembly, name: str) -> Provide:
    return Provide(lambda: getattr(assembly, name), sync_to_thread=False)


async def _name_request(message: Message, scope: Scope) -> None:
    """Every answer carries the request's id; inference has given its own."""
    if message["type"] == "http.response.start":
        state = scope.get("state", {})
        request_id = state.get("request_id") or "req_" + uuid.uuid4().hex
        message.setdefault("headers", [])
        MutableScopeHeaders(message)["x-request-id"] = request_id
