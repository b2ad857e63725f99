"""Routes, and the gates of routes and adapters."""

from typing import Literal

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from polyloom.platform.api.bodies import read_body
from polyloom.platform.api.guards import AuthorizedRequest, requires, tenant_of
from polyloom.platform.api.openapi import json_body
from polyloom.platform.api.paths import name_in_path
from polyloom.platform.generation.golden import GoldenPrompt
from polyloom.platform.services.gates import GateRunView, GateService, GateView
from polyloom.platform.services.route_views import RoutePlan, RouteView
from polyloom.platform.services.routes import RouteService
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.snapshot import RouteTarget

READS = [requires("adapters:read", "routes:write")]
CHANGES = [requires("routes:write")]


class RouteList(msgspec.Struct, frozen=True):
    """Routes by name, or versions of one, newest first."""

    data: tuple[RouteView, ...]
    object: Literal["list"] = "list"


class TargetBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A target: a `model` string, pinned or an alias, and its weight."""

    model: str
    weight: int = 1


class RouteBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body that sets a route's targets, and how tokens are drafted for its requests."""

    targets: list[TargetBody]
    drafts: DraftPolicy | None = None
    reason: str | None = None


class RouteRollback(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a rollback: to `version`, or to what was in force before."""

    version: int | None = None
    reason: str | None = None


class GateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body that replaces a gate's prompts; none opens it."""

    prompts: list[GoldenPrompt]


class GateRunList(msgspec.Struct, frozen=True):
    """Runs of a gate, newest first."""

    data: tuple[GateRunView, ...]
    object: Literal["list"] = "list"


@get("/v1/routes", guards=READS)
async def list_routes(
    request: AuthorizedRequest, routes: NamedDependency[RouteService]
) -> RouteList:
    """The tenant's routes."""
    return RouteList(await routes.list(tenant_of(request.auth).id))


@get("/v1/routes/{name:str}", guards=READS)
async def get_route(
    request: AuthorizedRequest, routes: NamedDependency[RouteService], name: FromPath[str]
) -> RouteView:
    """One route as it is in force."""
    return await routes.get(tenant_of(request.auth), name_in_path(name))


@get("/v1/routes/{name:str}/versions", guards=READS)
async def route_versions(
    request: AuthorizedRequest, routes: NamedDependency[RouteService], name: FromPath[str]
) -> RouteList:
    """Every version of a route, a deleted one's too."""
    return RouteList(await routes.versions(tenant_of(request.auth), name_in_path(name)))


@put("/v1/routes/{name:str}", guards=CHANGES, operation_class=json_body(RouteBody))
async def put_route(
    request: AuthorizedRequest,
    routes: NamedDependency[RouteService],
    name: FromPath[str],
    dry_run: FromQuery[bool] = False,
) -> RouteView | RoutePlan:
    """Create a route or give it its next version. dry_run: say what would change, and write
    nothing."""
    body = await read_body(RouteBody, request)
    targets = [RouteTarget(target.model, target.weight) for target in body.targets]
    tenant = tenant_of(request.auth)
    if dry_run:
        return await routes.plan(tenant, name_in_path(name), targets)
    return await routes.put(
        tenant,
        name_in_path(name),
        targets,
        drafts=body.drafts,
        author=request.auth.author,
        reason=body.reason,
    )


@post(
    "/v1/routes/{name:str}/rollback",
    guards=CHANGES,
    status_code=200,
    operation_class=json_body(RouteRollback),
)
async def roll_back_route(
    request: AuthorizedRequest, routes: NamedDependency[RouteService], name: FromPath[str]
) -> RouteView:
    """Make an older version's targets the next version; the body may be empty."""
    has_body = bool(await request.body())
    body = await read_body(RouteRollback, request) if has_body else RouteRollback()
    return await routes.rollback(
        tenant_of(request.auth),
        name_in_path(name),
        to=body.version,
        author=request.auth.author,
        reason=body.reason,
    )


@delete("/v1/routes/{name:str}", guards=CHANGES, status_code=200)
async def delete_route(
    request: AuthorizedRequest,
    routes: NamedDependency[RouteService],
    name: FromPath[str],
    reason: FromQuery[str | None] = None,
) -> RouteView:
    """Take a route away; its versions stay, and a rollback brings it back."""
    return await routes.delete(
        tenant_of(request.auth), name_in_path(name), author=request.auth.author, reason=reason
    )


@put("/v1/adapters/{name:str}/gate", guards=CHANGES, operation_class=json_body(GateBody))
async def put_adapter_gate(
    request: AuthorizedRequest, gates: NamedDependency[GateService], name: FromPath[str]
) -> GateView:
    """What a revision must answer before an alias of this adapter moves to it."""
    body = await read_body(GateBody, request)
    return await gates.put(
        tenant_of(request.auth),
        body.prompts,
        adapter=name_in_path(name),
        author=request.auth.author,
    )


@get("/v1/adapters/{name:str}/gate", guards=READS)
async def get_adapter_gate(
    request: AuthorizedRequest, gates: NamedDependency[GateService], name: FromPath[str]
) -> GateView:
    """An adapter's gate."""
    return await gates.get(tenant_of(request.auth), adapter=name_in_path(name))


@get("/v1/adapters/{name:str}/gate/runs", guards=READS)
async def adapter_gate_runs(
    request: AuthorizedRequest, gates: NamedDependency[GateService], name: FromPath[str]
) -> GateRunList:
    """Who passed an adapter's gate, and what was answered."""
    return GateRunList(await gates.runs(tenant_of(request.auth), adapter=name_in_path(name)))


@put("/v1/routes/{name:str}/gate", guards=CHANGES, operation_class=json_body(GateBody))
async def put_route_gate(
    request: AuthorizedRequest, gates: NamedDependency[GateService], name: FromPath[str]
) -> GateView:
    """What a target must answer before this route leads to it."""
    body = await read_body(GateBody, request)
    return await gates.put(
        tenant_of(request.auth), body.prompts, route=name_in_path(name), author=request.auth.author
    )


@get("/v1/routes/{name:str}/gate", guards=READS)
async def get_route_gate(
    request: AuthorizedRequest, gates: NamedDependency[GateService], name: FromPath[str]
) -> GateView:
    """A route's gate."""
    return await gates.get(tenant_of(request.auth), route=name_in_path(name))


@get("/v1/routes/{name:str}/gate/runs", guards=READS)
async def route_gate_runs(
    request: AuthorizedRequest, gates: NamedDependency[GateService], name: FromPath[str]
) -> GateRunList:
    """Who passed a route's gate, and what was answered."""
    return GateRunList(await gates.runs(tenant_of(request.auth), route=name_in_path(name)))


ROUTE_ROUTES = [
    list_routes,
    get_route,
    route_versions,
    put_route,
    roll_back_route,
    delete_route,
    put_adapter_gate,
    get_adapter_gate,
    adapter_gate_runs,
    put_route_gate,
    get_route_gate,
    route_gate_runs,
]
