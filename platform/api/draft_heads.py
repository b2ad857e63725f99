"""Draft heads: of a tenant's revisions, and (for the operator) the shared ones of the base."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec
from litestar import Response, delete, get, post
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery

from polyloom.platform.api.guards import AuthorizedRequest, requires, tenant_of
from polyloom.platform.api.openapi import upload_body
from polyloom.platform.api.paths import name_in_path
from polyloom.platform.api.receiving import receive_upload
from polyloom.platform.engine.model.store import BaseModel
from polyloom.platform.services.adapters import AdapterRegistry
from polyloom.platform.services.draft_heads import (
    BaseOwner,
    DraftHeadRegistry,
    RecordedHead,
    RevisionOwner,
)
from polyloom.platform.services.head_onboarding import DraftHeadOnboarding
from polyloom.platform.services.views import DraftHeadView

HEADS = "/v1/adapters/{name:str}/revisions/{number:int}/draft-heads"
SHARED = "/admin/draft-heads"
_ANSWER = {201: ResponseSpec(DraftHeadView, generate_examples=False)}


class DraftHeadList(msgspec.Struct, frozen=True):
    """Draft heads of one owner, newest first. shared_digest: of the base's promoted shared head, on
    which a revision's new head has to be a delta."""

    data: tuple[DraftHeadView, ...]
    shared_digest: str | None
    object: Literal["list"] = "list"


@post(
    HEADS,
    guards=[requires("adapters:write")],
    operation_class=upload_body(),
    request_max_body_size=None,
    responses=_ANSWER,
)
async def upload_draft_head(
    request: AuthorizedRequest,
    registry: NamedDependency[AdapterRegistry],
    head_onboarding: NamedDependency[DraftHeadOnboarding],
    name: FromPath[str],
    number: FromPath[int],
    promote: FromQuery[bool] = False,
) -> Response[DraftHeadView]:
    """Upload a draft head's folder for a revision. promote: draft with it at once. Content that is
    a head of the revision already answers 200 with it."""
    tenant = tenant_of(request.auth)
    revision = await registry.revision(tenant.id, name_in_path(name), number)
    recorded = await head_onboarding.upload(
        RevisionOwner(tenant.id, revision.adapter, number),
        revision.digest,
        partial(receive_upload, request),
        author=request.auth.author,
        promote=promote,
    )
    return _answer(recorded)


@get(HEADS, guards=[requires("adapters:read")])
async def list_draft_heads(
    request: AuthorizedRequest,
    draft_heads: NamedDependency[DraftHeadRegistry],
    base: NamedDependency[BaseModel],
    name: FromPath[str],
    number: FromPath[int],
) -> DraftHeadList:
    """A revision's draft heads."""
    heads = await draft_heads.list(_owner(request, name, number))
    shared = await draft_heads.list(BaseOwner(base.digest))
    return DraftHeadList(heads, _promoted(shared))


@post(HEADS + "/{head:int}/promote", guards=[requires("adapters:write")], status_code=200)
async def promote_draft_head(
    request: AuthorizedRequest,
    draft_heads: NamedDependency[DraftHeadRegistry],
    name: FromPath[str],
    number: FromPath[int],
    head: FromPath[int],
) -> DraftHeadView:
    """Draft with this head from now on."""
    owner = _owner(request, name, number)
    return await draft_heads.promote(owner, head, author=request.auth.author)


@delete(HEADS + "/{head:int}", guards=[requires("adapters:write")], status_code=200)
async def retire_draft_head(
    request: AuthorizedRequest,
    draft_heads: NamedDependency[DraftHeadRegistry],
    name: FromPath[str],
    number: FromPath[int],
    head: FromPath[int],
) -> DraftHeadView:
    """Take a head out of service for good. Requests go on, with the base's shared head if any."""
    owner = _owner(request, name, number)
    return await draft_heads.retire(owner, head, author=request.auth.author)


@post(
    SHARED,
    guards=[requires("admin")],
    operation_class=upload_body(),
    request_max_body_size=None,
    responses=_ANSWER,
)
async def upload_shared_head(
    request: AuthorizedRequest,
    head_onboarding: NamedDependency[DraftHeadOnboarding],
    base: NamedDependency[BaseModel],
    promote: FromQuery[bool] = False,
) -> Response[DraftHeadView]:
    """Upload a shared draft head of the base."""
    recorded = await head_onboarding.upload(
        BaseOwner(base.digest),
        None,
        partial(receive_upload, request),
        author=request.auth.author,
        promote=promote,
    )
    return _answer(recorded)


@get(SHARED, guards=[requires("admin")])
async def list_shared_heads(
    draft_heads: NamedDependency[DraftHeadRegistry], base: NamedDependency[BaseModel]
) -> DraftHeadList:
    """The base's shared draft heads."""
    heads = await draft_heads.list(BaseOwner(base.digest))
    return DraftHeadList(heads, _promoted(heads))


@post(SHARED + "/{head:int}/promote", guards=[requires("admin")], status_code=200)
async def promote_shared_head(
    request: AuthorizedRequest,
    draft_heads: NamedDependency[DraftHeadRegistry],
    base: NamedDependency[BaseModel],
    head: FromPath[int],
) -> DraftHeadView:
    """Draft with this head wherever a revision has none of its own."""
    owner = BaseOwner(base.digest)
    return await draft_heads.promote(owner, head, author=request.auth.author)


@delete(SHARED + "/{head:int}", guards=[requires("admin")], status_code=200)
async def retire_shared_head(
    request: AuthorizedRequest,
    draft_heads: NamedDependency[DraftHeadRegistry],
    base: NamedDependency[BaseModel],
    head: FromPath[int],
) -> DraftHeadView:
    """Take a shared head out of service for good, and every adapter's head that is a delta on it."""
    owner = BaseOwner(base.digest)
    return await draft_heads.retire(owner, head, author=request.auth.author)


def _owner(request: AuthorizedRequest, name: str, number: int) -> RevisionOwner:
    return RevisionOwner(tenant_of(request.auth).id, name_in_path(name), number)


def _promoted(heads: Sequence[DraftHeadView]) -> str | None:
    return next((head.digest for head in heads if head.promoted), None)


def _answer(recorded: RecordedHead) -> Response[DraftHeadView]:
    return Response(recorded.view, status_code=201 if recorded.created else 200)


DRAFT_HEAD_ROUTES = [
    upload_draft_head,
    list_draft_heads,
    promote_draft_head,
    retire_draft_head,
    upload_shared_head,
    list_shared_heads,
    promote_shared_head,
    retire_shared_head,
]
