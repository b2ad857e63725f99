"""`/v1/prefixes`: prompts' beginnings that are kept warm."""

from typing import Literal

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath

from polyloom.platform.api.bodies import read_body
from polyloom.platform.api.chat import message_of
from polyloom.platform.api.guards import AuthorizedRequest, requires, tenant_of
from polyloom.platform.api.openapi import json_body
from polyloom.platform.api.paths import name_in_path
from polyloom.platform.api.schemas import ChatMessage
from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.held_prefixes import HeldRequest
from polyloom.platform.services.prefix_holds import PrefixHolds
from polyloom.platform.services.prefix_views import HoldView

INFERENCE = [requires("inference")]


class PrefixRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What to hold: `messages` (a system prompt, a conversation's beginning) or `prompt`, as they
    will be sent with `model`; `cache_salt` if they will be sent with one."""

    name: str
    model: str
    messages: list[ChatMessage] | None = None
    prompt: str | list[int] | None = None
    cache_salt: str | None = None


class PrefixList(msgspec.Struct, frozen=True):
    """A tenant's held prefixes."""

    data: tuple[HoldView, ...]
    object: Literal["list"] = "list"


@post("/v1/prefixes", guards=INFERENCE, operation_class=json_body(PrefixRequest))
async def hold_prefix(request: AuthorizedRequest, holds: NamedDependency[PrefixHolds]) -> HoldView:
    """Warm a prefix in every engine and keep it there, over restarts, until it is released."""
    body = await read_body(PrefixRequest, request)
    tenant = tenant_of(request.auth)
    return await holds.add(tenant, body.name, held_of(body), author=request.auth.author)


@get("/v1/prefixes", guards=INFERENCE)
async def list_prefixes(
    request: AuthorizedRequest, holds: NamedDependency[PrefixHolds]
) -> PrefixList:
    """The tenant's held prefixes, and how many engines hold each now."""
    return PrefixList(await holds.list(tenant_of(request.auth)))


@delete("/v1/prefixes/{name:str}", guards=INFERENCE)
async def release_prefix(
    request: AuthorizedRequest, holds: NamedDependency[PrefixHolds], name: FromPath[str]
) -> None:
    """Hold it no longer; its blocks stay cached until they are evicted."""
    tenant = tenant_of(request.auth)
    await holds.end(tenant, name_in_path(name), author=request.auth.author)


def held_of(body: PrefixRequest) -> HeldRequest:
    """Raises InvalidRequest naming the field."""
    if (body.messages is None) == (body.prompt is None):
        raise InvalidRequest("give either messages or prompt", param="messages")
    messages = body.messages
    if messages is not None and not messages:
        raise InvalidRequest("needs at least one message", param="messages")
    return HeldRequest(
        model=body.model,
        messages=None
        if messages is None
        else [message_of(m, f"messages[{i}]") for i, m in enumerate(messages)],
        prompt=body.prompt,
        cache_salt=body.cache_salt,
    )


PREFIX_ROUTES = [hold_prefix, list_prefixes, release_prefix]
