"""Draft heads of an owner: a tenant's revision, or (for the operator) the base, whose are shared.

The same four calls stand below both paths; they differ in who may call them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from litestar import Response, Router, delete, get, post
from litestar.di import NamedDependency, Provide
from litestar.handlers.base import BaseRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, SkipValidation

from polyloom.platform.api.guards import (
    AuthorizedRequest,
    Connection,
    Guard,
    requires,
    tenant_of,
)
from polyloom.platform.api.openapi import upload_body
from polyloom.platform.api.paths import name_in_path
from polyloom.platform.api.receiving import receive_upload
from polyloom.platform.engine.model.store import BaseModel
from polyloom.platform.services.adapters import AdapterRegistry
from polyloom.platform.services.draft_heads import (
    BaseOwner,
    DraftHeadRegistry,
    HeadOwner,
    RevisionOwner,
)
from polyloom.platform.services.head_onboarding import DraftHeadOnboarding
from polyloom.platform.services.views import DraftHeadView, Scope

Owner = SkipValidation[HeadOwner]
"""Made here of a checked path; msgspec knows no unions of dataclasses."""


class DraftHeadList(msgspec.Struct, frozen=True):
    """Draft heads of one owner, newest first. shared_digest: of the base's promoted shared head, on
    which a revision's new head has to be a delta."""

    data: tuple[DraftHeadView, ...]
    shared_digest: str | None
    object: Literal["list"] = "list"


@post(
    "/",
    operation_class=upload_body(),
    request_max_body_size=None,
    responses={201: ResponseSpec(DraftHeadView, generate_examples=False)},
)
async def upload_draft_head(
    request: AuthorizedRequest,
    owner: NamedDependency[Owner],
    registry: NamedDependency[AdapterRegistry],
    head_onboarding: NamedDependency[DraftHeadOnboarding],
    promote: FromQuery[bool] = False,
) -> Response[DraftHeadView]:
    """Upload a draft head's folder. promote: draft with it at once. Content that is a head of the
    owner already answers 200 with it."""
    recorded = await head_onboarding.upload(
        owner,
        await _adapter_digest(owner, registry),
        partial(receive_upload, request),
        author=request.auth.author,
        promote=promote,
    )
    return Response(recorded.view, status_code=201 if recorded.created else 200)


@get("/")
async def list_draft_heads(
    owner: NamedDependency[Owner],
    draft_heads: NamedDependency[DraftHeadRegistry],
    base: NamedDependency[BaseModel],
) -> DraftHeadList:
    """The draft heads of a revision, or the base's shared ones."""
    heads = await draft_heads.list(owner)
    return DraftHeadList(heads, _promoted(await draft_heads.list(BaseOwner(base.digest))))


@post("/{head:int}/promote", status_code=200)
async def promote_draft_head(
    request: AuthorizedRequest,
    owner: NamedDependency[Owner],
    draft_heads: NamedDependency[DraftHeadRegistry],
    head: FromPath[int],
) -> DraftHeadView:
    """Draft with this head from now on; a shared one wherever a revision has none of its own."""
    return await draft_heads.promote(owner, head, author=request.auth.author)


@delete("/{head:int}", status_code=200)
async def retire_draft_head(
    request: AuthorizedRequest,
    owner: NamedDependency[Owner],
    draft_heads: NamedDependency[DraftHeadRegistry],
    head: FromPath[int],
) -> DraftHeadView:
    """Take a head out of service for good; requests go on, with the base's shared head if any. With
    a shared head goes every adapter's that is a delta on it."""
    return await draft_heads.retire(owner, head, author=request.auth.author)


async def _adapter_digest(owner: HeadOwner, registry: AdapterRegistry) -> str | None:
    """Of the revision that heads of this owner are for."""
    if isinstance(owner, BaseOwner):
        return None
    return (await registry.revision(owner.tenant_id, owner.adapter, owner.number)).digest


def _promoted(heads: Sequence[DraftHeadView]) -> str | None:
    return next((head.digest for head in heads if head.promoted), None)


async def _of_revision(
    request: AuthorizedRequest, name: FromPath[str], number: FromPath[int]
) -> HeadOwner:
    return RevisionOwner(tenant_of(request.auth).id, name_in_path(name), number)


async def _of_base(base: NamedDependency[BaseModel]) -> HeadOwner:
    return BaseOwner(base.digest)


def _below(path: str, owner: Any, *, reads: Scope, changes: Scope) -> Router:
    """The calls below a path. owner: provides whose heads they are."""
    to_read, to_change = requires(reads), requires(changes)

    async def guard(connection: Connection, handler: BaseRouteHandler) -> None:
        needed: Guard = to_read if connection.scope.get("method") == "GET" else to_change
        await needed(connection, handler)

    return Router(
        path,
        route_handlers=[
            upload_draft_head,
            list_draft_heads,
            promote_draft_head,
            retire_draft_head,
        ],
        dependencies={"owner": Provide(owner)},
        guards=[guard],
    )


DRAFT_HEAD_ROUTES = [
    _below(
        "/v1/adapters/{name:str}/revisions/{number:int}/draft-heads",
        _of_revision,
        reads="adapters:read",
        changes="adapters:write",
    ),
    _below("/admin/draft-heads", _of_base, reads="admin", changes="admin"),
]
