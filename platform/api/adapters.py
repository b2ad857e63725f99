"""Adapters, their revisions and aliases: what an ML engineer works with."""

from functools import partial
from typing import Literal

import msgspec
from litestar import Response, delete, get, post, put
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery

from polyloom.platform.api.bodies import read_body
from polyloom.platform.api.guards import AuthorizedRequest, requires, tenant_of
from polyloom.platform.api.openapi import json_body, upload_body
from polyloom.platform.api.paths import name_in_path
from polyloom.platform.api.receiving import receive_upload
from polyloom.platform.services.adapters import AdapterRegistry
from polyloom.platform.services.aliases import AliasService
from polyloom.platform.services.onboarding import Onboarding
from polyloom.platform.services.promotion import Promotion
from polyloom.platform.services.retirement import Retirement
from polyloom.platform.services.views import AdapterView, AliasChangeView, AliasView, RevisionView


class AdapterList(msgspec.Struct, frozen=True):
    """Answer of `GET /v1/adapters`."""

    data: tuple[AdapterView, ...]
    object: Literal["list"] = "list"


class AliasHistory(msgspec.Struct, frozen=True):
    """Changes of an alias, newest first."""

    data: tuple[AliasChangeView, ...]
    object: Literal["list"] = "list"


class AliasMove(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body that moves an alias: to a revision's number."""

    revision: int
    reason: str | None = None


class AliasRollback(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of a rollback."""

    reason: str | None = None


@post(
    "/v1/adapters/{name:str}/revisions",
    guards=[requires("adapters:write")],
    operation_class=upload_body(),
    request_max_body_size=None,
    responses={201: ResponseSpec(RevisionView, generate_examples=False)},
)
async def upload_revision(
    request: AuthorizedRequest,
    onboarding: NamedDependency[Onboarding],
    name: FromPath[str],
    promote: FromQuery[str | None] = None,
    wait: FromQuery[bool] = False,
) -> Response[RevisionView]:
    """Upload a PEFT folder as the adapter's next revision.

    promote: alias to move once the revision is ready. wait: answer when it is, or with 422 and the
    verdict when it failed. Content that is a revision already answers 200 with that revision.
    """
    begun = await onboarding.upload(
        tenant_of(request.auth),
        name_in_path(name),
        partial(receive_upload, request),
        author=request.auth.author,
        promote=promote,
    )
    revision = await onboarding.settled(begun.revision) if wait else begun.revision
    return Response(revision, status_code=201 if begun.created else 200)


@get("/v1/adapters", guards=[requires("adapters:read")])
async def list_adapters(
    request: AuthorizedRequest, registry: NamedDependency[AdapterRegistry]
) -> AdapterList:
    """The tenant's adapters with their aliases and revisions."""
    return AdapterList(await registry.list(tenant_of(request.auth).id))


@get("/v1/adapters/{name:str}", guards=[requires("adapters:read")])
async def get_adapter(
    request: AuthorizedRequest, registry: NamedDependency[AdapterRegistry], name: FromPath[str]
) -> AdapterView:
    """One adapter."""
    return await registry.get(tenant_of(request.auth).id, name_in_path(name))


@get("/v1/adapters/{name:str}/revisions/{number:int}", guards=[requires("adapters:read")])
async def get_revision(
    request: AuthorizedRequest,
    registry: NamedDependency[AdapterRegistry],
    name: FromPath[str],
    number: FromPath[int],
) -> RevisionView:
    """One revision with its state and verdict."""
    return await registry.revision(tenant_of(request.auth).id, name_in_path(name), number)


@delete(
    "/v1/adapters/{name:str}/revisions/{number:int}",
    guards=[requires("adapters:write")],
    status_code=200,
)
async def retire_revision(
    request: AuthorizedRequest,
    retirement: NamedDependency[Retirement],
    name: FromPath[str],
    number: FromPath[int],
    force: FromQuery[bool] = False,
) -> RevisionView:
    """Take a revision out of service for good. What runs on it finishes. One that a route leads to
    is refused unless `force`."""
    return await retirement.retire(
        tenant_of(request.auth),
        name_in_path(name),
        number,
        author=request.auth.author,
        force=force,
    )


@get("/v1/adapters/{name:str}/aliases/{alias:str}", guards=[requires("adapters:read")])
async def get_alias(
    request: AuthorizedRequest,
    aliases: NamedDependency[AliasService],
    name: FromPath[str],
    alias: FromPath[str],
) -> AliasView:
    """Where an alias points."""
    return await aliases.get(tenant_of(request.auth).id, name_in_path(name), name_in_path(alias))


@put(
    "/v1/adapters/{name:str}/aliases/{alias:str}",
    guards=[requires("adapters:write")],
    operation_class=json_body(AliasMove),
)
async def move_alias(
    request: AuthorizedRequest,
    promotion: NamedDependency[Promotion],
    name: FromPath[str],
    alias: FromPath[str],
) -> AliasView:
    """Point an alias at a ready revision that passes the gates before it. New requests take it at
    once; running ones finish."""
    body = await read_body(AliasMove, request)
    return await promotion.move(
        tenant_of(request.auth),
        name_in_path(name),
        name_in_path(alias),
        body.revision,
        author=request.auth.author,
        reason=body.reason,
    )


@get("/v1/adapters/{name:str}/aliases/{alias:str}/history", guards=[requires("adapters:read")])
async def alias_history(
    request: AuthorizedRequest,
    aliases: NamedDependency[AliasService],
    name: FromPath[str],
    alias: FromPath[str],
) -> AliasHistory:
    """Every change of an alias."""
    tenant = tenant_of(request.auth)
    return AliasHistory(await aliases.history(tenant.id, name_in_path(name), name_in_path(alias)))


@post(
    "/v1/adapters/{name:str}/aliases/{alias:str}/rollback",
    guards=[requires("adapters:write")],
    status_code=200,
    operation_class=json_body(AliasRollback),
)
async def roll_back_alias(
    request: AuthorizedRequest,
    aliases: NamedDependency[AliasService],
    name: FromPath[str],
    alias: FromPath[str],
) -> AliasView:
    """Point an alias where it pointed before; the body may be empty."""
    has_body = bool(await request.body())
    body = await read_body(AliasRollback, request) if has_body else AliasRollback()
    return await aliases.rollback(
        tenant_of(request.auth).id,
        name_in_path(name),
        name_in_path(alias),
        author=request.auth.author,
        reason=body.reason,
    )


ADAPTER_ROUTES = [
    upload_revision,
    list_adapters,
    get_adapter,
    get_revision,
    retire_revision,
    get_alias,
    move_alias,
    alias_history,
    roll_back_alias,
]
