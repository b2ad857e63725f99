"""What prefix caches do: a tenant's own report, why two requests share or not, and invalidation."""

from typing import Literal

import msgspec
from litestar import delete, get, post
from litestar.di import NamedDependency

from polyloom.platform.api.bodies import decode_as, read_body
from polyloom.platform.api.chat import plan_prompt
from polyloom.platform.api.completions import first_prompt
from polyloom.platform.api.guards import AuthorizedRequest, requires, tenant_of
from polyloom.platform.api.openapi import json_body
from polyloom.platform.api.schemas import ChatRequest, CompletionRequest
from polyloom.platform.engine.messages import Invalidate
from polyloom.platform.engine.pool import EnginePool
from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.cache_misses import MissView
from polyloom.platform.generation.explain import Explanation, PlannedRequest, explain
from polyloom.platform.generation.inference import Inference, Target
from polyloom.platform.generation.request_plan import SamplingOptions, plan_salt
from polyloom.platform.services.invalidations import Invalidations
from polyloom.platform.services.prefix_accounts import PrefixAccounts
from polyloom.platform.services.prefix_views import CacheAccount, InvalidationView
from polyloom.platform.services.tenants import TenantService
from polyloom.routing.request import CacheOwner

ADMIN = [requires("admin")]
INFERENCE = [requires("inference")]
ENDPOINT = "cache.explain"


class OwnCache(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's account, and its requests that lately missed, newest first."""

    account: CacheAccount
    recent_misses: tuple[MissView, ...]


class ExplainRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Two bodies of `/v1/chat/completions` or `/v1/completions`."""

    first: msgspec.Raw
    second: msgspec.Raw


class InvalidateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which caches: those that agree with all that is given. base, adapter, template: digests."""

    owner: CacheOwner | None = None
    base: str | None = None
    adapter: str | None = None
    template: str | None = None
    cause: Literal["operator"] = "operator"


@get("/v1/cache", guards=[requires("usage:read")])
async def own_cache(
    request: AuthorizedRequest,
    prefix_accounts: NamedDependency[PrefixAccounts],
    inference: NamedDependency[Inference],
) -> OwnCache:
    """What the tenant's prefix caches gave it, and what its requests missed by."""
    slug = tenant_of(request.auth).slug
    account = await prefix_accounts.account(CacheOwner("tenant", slug))
    return OwnCache(account=account, recent_misses=inference.cache.misses.of(slug))


@delete("/v1/cache", guards=INFERENCE, status_code=200)
async def purge_own_cache(
    request: AuthorizedRequest,
    invalidations: NamedDependency[Invalidations],
    inference: NamedDependency[Inference],
) -> InvalidationView:
    """Drop everything that is cached of the tenant's own prompts. Held prefixes are warmed anew."""
    slug = tenant_of(request.auth).slug
    inference.cache.misses.forget(slug)
    command = Invalidate(cause="tenant_purged", owner=CacheOwner("tenant", slug))
    return await invalidations.invalidate(command, author=request.auth.author)


@post(
    "/v1/cache/explain",
    guards=INFERENCE,
    status_code=200,
    operation_class=json_body(ExplainRequest),
)
async def explain_requests(
    request: AuthorizedRequest,
    inference: NamedDependency[Inference],
    engine: NamedDependency[EnginePool],
) -> Explanation:
    """Whether the second request would reuse what the first left, and what sets them apart."""
    body = await read_body(ExplainRequest, request)
    first = await _planned(request, inference, body.first, "first")
    second = await _planned(request, inference, body.second, "second")
    return explain(first, second, engine.block_size)


@get("/admin/cache", guards=ADMIN)
async def all_caches(prefix_accounts: NamedDependency[PrefixAccounts]) -> CacheAccount:
    """Every namespace and their total. Prompts are shown to nobody but the tenant that sent them."""
    return await prefix_accounts.account()


@post(
    "/admin/cache/invalidate",
    guards=ADMIN,
    status_code=200,
    operation_class=json_body(InvalidateRequest),
)
async def invalidate_caches(
    request: AuthorizedRequest,
    invalidations: NamedDependency[Invalidations],
    tenants: NamedDependency[TenantService],
) -> InvalidationView:
    """Make cached blocks unreachable everywhere; without any field, all of them."""
    body = await read_body(InvalidateRequest, request)
    if body.owner is not None and body.owner.kind == "tenant":
        await tenants.get(body.owner.name)
    command = Invalidate(
        cause=body.cause,
        owner=body.owner,
        base_digest=body.base,
        adapter_digest=body.adapter,
        template_digest=body.template,
    )
    return await invalidations.invalidate(command, author=request.auth.author)


async def _planned(
    request: AuthorizedRequest, inference: Inference, raw: msgspec.Raw, param: str
) -> PlannedRequest:
    """Raises what the request itself would, with `param` before the field's name."""
    fields = decode_as(_Fields, raw, param)
    if fields.messages is not msgspec.UNSET:
        chat = decode_as(ChatRequest, raw, param)
        target = await _target(request, inference, chat)
        prompt = await plan_prompt(chat, target)
    elif fields.prompt is not msgspec.UNSET:
        completion = decode_as(CompletionRequest, raw, param)
        target = await _target(request, inference, completion)
        prompt = await first_prompt(completion, target)
    else:
        raise InvalidRequest(f"{param} has neither messages nor prompt", param=param)
    return PlannedRequest(
        request=inference.call(target, [prompt], 1, ()).plan.sequences[0],
        label=target.resolution.label,
        tokenizer=target.format.tokenizer,
    )


async def _target(
    request: AuthorizedRequest, inference: Inference, body: SamplingOptions
) -> Target:
    return await inference.target(
        tenant_of(request.auth),
        request.auth.key_id,
        body.model,
        ENDPOINT,
        session=body.user,
        salt=plan_salt(body),
    )


class _Fields(msgspec.Struct):
    """By which a body is told to be a chat's or a completion's."""

    messages: object = msgspec.UNSET
    prompt: object = msgspec.UNSET


CACHE_ROUTES = [
    own_cache,
    purge_own_cache,
    explain_requests,
    all_caches,
    invalidate_caches,
]
