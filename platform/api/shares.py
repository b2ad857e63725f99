"""Share groups: the owner's side by the group's name, a member's by its id."""

from typing import Literal

import msgspec
from litestar import delete, get, post, put
from litestar.di import NamedDependency
from litestar.params import FromPath

from polyloom.platform.api.bodies import read_body
from polyloom.platform.api.guards import AuthorizedRequest, requires, tenant_of
from polyloom.platform.api.openapi import json_body
from polyloom.platform.api.paths import name_in_path
from polyloom.platform.services.route_views import ShareGroupView
from polyloom.platform.services.shares import ShareService

READS = [requires("adapters:read", "routes:write")]
CHANGES = [requires("routes:write")]


class ShareGroupList(msgspec.Struct, frozen=True):
    """Groups that the tenant owns, is in, or is invited to."""

    data: tuple[ShareGroupView, ...]
    object: Literal["list"] = "list"


class NewShareGroup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body that creates a group. `name`: what its owner calls it."""

    name: str


class SharedRevision(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body that shares a revision of an adapter."""

    revision: int


class Acceptance(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body that accepts an invitation. `mount`: what this tenant calls the group."""

    mount: str


@post("/v1/share-groups", guards=CHANGES, operation_class=json_body(NewShareGroup))
async def create_share_group(
    request: AuthorizedRequest, shares: NamedDependency[ShareService]
) -> ShareGroupView:
    """Create a group, with this tenant as its owner and first member."""
    body = await read_body(NewShareGroup, request)
    return await shares.create(tenant_of(request.auth), body.name, author=request.auth.author)


@get("/v1/share-groups", guards=READS)
async def list_share_groups(
    request: AuthorizedRequest, shares: NamedDependency[ShareService]
) -> ShareGroupList:
    """Groups of this tenant; one without a mount is an invitation."""
    return ShareGroupList(await shares.list(tenant_of(request.auth)))


@get("/v1/share-groups/{name:str}", guards=READS)
async def get_share_group(
    request: AuthorizedRequest, shares: NamedDependency[ShareService], name: FromPath[str]
) -> ShareGroupView:
    """One group of this owner."""
    return await shares.get(tenant_of(request.auth), name_in_path(name))


@delete("/v1/share-groups/{name:str}", guards=CHANGES)
async def delete_share_group(
    request: AuthorizedRequest, shares: NamedDependency[ShareService], name: FromPath[str]
) -> None:
    """End a group for all its members, at once."""
    await shares.delete(tenant_of(request.auth), name_in_path(name), author=request.auth.author)


@put(
    "/v1/share-groups/{name:str}/adapters/{adapter:str}",
    guards=CHANGES,
    operation_class=json_body(SharedRevision),
)
async def share_adapter(
    request: AuthorizedRequest,
    shares: NamedDependency[ShareService],
    name: FromPath[str],
    adapter: FromPath[str],
) -> ShareGroupView:
    """Share a ready revision of an adapter, in place of another one of it."""
    body = await read_body(SharedRevision, request)
    return await shares.share(
        tenant_of(request.auth),
        name_in_path(name),
        name_in_path(adapter),
        body.revision,
        author=request.auth.author,
    )


@delete("/v1/share-groups/{name:str}/adapters/{adapter:str}", guards=CHANGES, status_code=200)
async def unshare_adapter(
    request: AuthorizedRequest,
    shares: NamedDependency[ShareService],
    name: FromPath[str],
    adapter: FromPath[str],
) -> ShareGroupView:
    """Take an adapter back: 404 for the members at once."""
    return await shares.unshare(
        tenant_of(request.auth),
        name_in_path(name),
        name_in_path(adapter),
        author=request.auth.author,
    )


@put("/v1/share-groups/{name:str}/base", guards=CHANGES)
async def share_base(
    request: AuthorizedRequest, shares: NamedDependency[ShareService], name: FromPath[str]
) -> ShareGroupView:
    """Let the members call the base through the group, in the group's cache."""
    return await shares.share_base(
        tenant_of(request.auth), name_in_path(name), True, author=request.auth.author
    )


@delete("/v1/share-groups/{name:str}/base", guards=CHANGES, status_code=200)
async def unshare_base(
    request: AuthorizedRequest, shares: NamedDependency[ShareService], name: FromPath[str]
) -> ShareGroupView:
    """Take the base out of the group."""
    return await shares.share_base(
        tenant_of(request.auth), name_in_path(name), False, author=request.auth.author
    )


@put("/v1/share-groups/{name:str}/members/{tenant:str}", guards=CHANGES)
async def invite_member(
    request: AuthorizedRequest,
    shares: NamedDependency[ShareService],
    name: FromPath[str],
    tenant: FromPath[str],
) -> ShareGroupView:
    """Invite a tenant by its slug; it is in once it accepts."""
    return await shares.invite(
        tenant_of(request.auth),
        name_in_path(name),
        name_in_path(tenant),
        author=request.auth.author,
    )


@delete("/v1/share-groups/{name:str}/members/{tenant:str}", guards=CHANGES, status_code=200)
async def remove_member(
    request: AuthorizedRequest,
    shares: NamedDependency[ShareService],
    name: FromPath[str],
    tenant: FromPath[str],
) -> ShareGroupView:
    """Put a tenant out of the group, at once."""
    return await shares.remove(
        tenant_of(request.auth),
        name_in_path(name),
        name_in_path(tenant),
        author=request.auth.author,
    )


@put("/v1/memberships/{group:str}", guards=CHANGES, operation_class=json_body(Acceptance))
async def accept_invitation(
    request: AuthorizedRequest, shares: NamedDependency[ShareService], group: FromPath[str]
) -> ShareGroupView:
    """Join the group with this id, under a name of this tenant's own choice."""
    body = await read_body(Acceptance, request)
    return await shares.accept(
        tenant_of(request.auth), name_in_path(group), body.mount, author=request.auth.author
    )


@delete("/v1/memberships/{group:str}", guards=CHANGES)
async def leave_group(
    request: AuthorizedRequest, shares: NamedDependency[ShareService], group: FromPath[str]
) -> None:
    """Leave a group, or decline its invitation."""
    await shares.leave(tenant_of(request.auth), name_in_path(group), author=request.auth.author)


SHARE_ROUTES = [
    create_share_group,
    list_share_groups,
    get_share_group,
    delete_share_group,
    share_adapter,
    unshare_adapter,
    share_base,
    unshare_base,
    invite_member,
    remove_member,
    accept_invitation,
    leave_group,
]
