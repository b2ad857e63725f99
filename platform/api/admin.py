"""The operator's side: tenants, keys, limits, usage, audit, and what the engine holds."""

from datetime import datetime
from typing import Literal

import msgspec
from litestar import delete, get, patch, post
from litestar.di import NamedDependency
from litestar.params import FromPath, FromQuery

from polyloom.platform.api.bodies import read_body
from polyloom.platform.api.guards import AuthorizedRequest, requires
from polyloom.platform.api.openapi import json_body
from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.engine.messages import AdapterResidency, Capability, Invalidate, Snapshot
from polyloom.platform.engine.pool import EnginePool
from polyloom.platform.errors import EngineUnavailable
from polyloom.platform.services.audit import AuditService
from polyloom.platform.services.invalidations import Invalidations
from polyloom.platform.services.keys import KeyService
from polyloom.platform.services.snapshots import SnapshotService
from polyloom.platform.services.tenants import TenantService
from polyloom.platform.services.usage import UsageFilter, UsageService
from polyloom.platform.services.views import (
    AuditEntry,
    KeyView,
    Scope,
    TenantLimits,
    TenantState,
    TenantView,
    UsageRecord,
    UsageTotal,
)
from polyloom.routing.request import CacheOwner

ADMIN = [requires("admin")]


class NewTenant(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body that creates a tenant."""

    slug: str
    limits: TenantLimits = TenantLimits()
    weight: float = 1.0


class TenantChange(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body that changes a tenant; what is absent stays. `limits` replaces all limits."""

    limits: TenantLimits | None = None
    weight: float | None = None
    state: TenantState | None = None


class NewKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body that issues a key."""

    scopes: list[Scope]
    expires_at: datetime | None = None


class ShownKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new key. `key` is shown this once."""

    key: str
    id: int
    prefix: str
    scopes: tuple[Scope, ...]
    created_at: datetime
    expires_at: datetime | None


class TenantList(msgspec.Struct, frozen=True):
    """All tenants."""

    data: tuple[TenantView, ...]
    object: Literal["list"] = "list"


class KeyList(msgspec.Struct, frozen=True):
    """A tenant's keys."""

    data: tuple[KeyView, ...]
    object: Literal["list"] = "list"


class UsageTotals(msgspec.Struct, frozen=True):
    """Sums of usage, one entry a group."""

    data: tuple[UsageTotal, ...]
    object: Literal["list"] = "list"


class UsageRows(msgspec.Struct, frozen=True):
    """Usage request by request, newest first."""

    data: tuple[UsageRecord, ...]
    object: Literal["list"] = "list"


class AuditTrail(msgspec.Struct, frozen=True):
    """Who changed what, newest first."""

    data: tuple[AuditEntry, ...]
    object: Literal["list"] = "list"


class CapabilityList(msgspec.Struct, frozen=True):
    """Which implementation of each op runs, and what fell back."""

    data: tuple[Capability, ...]
    object: Literal["list"] = "list"


class ResidentRevision(msgspec.Struct, frozen=True, kw_only=True):
    """A content on the device, and the revisions (`tenant/adapter@number`) that it is."""

    residency: AdapterResidency
    revisions: tuple[str, ...]


class ResidencyList(msgspec.Struct, frozen=True):
    """What is on the device or on its way there."""

    data: tuple[ResidentRevision, ...]
    object: Literal["list"] = "list"


@post("/admin/tenants", guards=ADMIN, operation_class=json_body(NewTenant))
async def create_tenant(
    request: AuthorizedRequest, tenants: NamedDependency[TenantService]
) -> TenantView:
    """Create a tenant."""
    body = await read_body(NewTenant, request)
    return await tenants.create(
        body.slug, body.limits, author=request.auth.author, weight=body.weight
    )


@get("/admin/tenants", guards=ADMIN)
async def list_tenants(tenants: NamedDependency[TenantService]) -> TenantList:
    """All tenants."""
    return TenantList(await tenants.list())


@get("/admin/tenants/{slug:str}", guards=ADMIN)
async def get_tenant(tenants: NamedDependency[TenantService], slug: FromPath[str]) -> TenantView:
    """One tenant."""
    return await tenants.get(slug)


@patch("/admin/tenants/{slug:str}", guards=ADMIN, operation_class=json_body(TenantChange))
async def change_tenant(
    request: AuthorizedRequest,
    tenants: NamedDependency[TenantService],
    invalidations: NamedDependency[Invalidations],
    slug: FromPath[str],
) -> TenantView:
    """Set a tenant's limits and weight, disable or enable it. Nothing stays cached of a disabled
    one."""
    body = await read_body(TenantChange, request)
    author = request.auth.author
    if body.limits is not None:
        await tenants.set_limits(slug, body.limits, author=author)
    if body.weight is not None:
        await tenants.set_weight(slug, body.weight, author=author)
    if body.state is not None:
        await tenants.set_state(slug, body.state, author=author)
    if body.state == "disabled":
        purge = Invalidate(cause="tenant_purged", owner=CacheOwner("tenant", slug))
        await invalidations.invalidate(purge, author=author)
    return await tenants.get(slug)


@post("/admin/tenants/{slug:str}/keys", guards=ADMIN, operation_class=json_body(NewKey))
async def issue_key(
    request: AuthorizedRequest, keys: NamedDependency[KeyService], slug: FromPath[str]
) -> ShownKey:
    """Issue a key; it is shown once."""
    body = await read_body(NewKey, request)
    issued = await keys.issue(
        slug, body.scopes, author=request.auth.author, expires_at=body.expires_at
    )
    view = issued.view
    return ShownKey(
        key=issued.key,
        id=view.id,
        prefix=view.prefix,
        scopes=view.scopes,
        created_at=view.created_at,
        expires_at=view.expires_at,
    )


@get("/admin/tenants/{slug:str}/keys", guards=ADMIN)
async def list_keys(keys: NamedDependency[KeyService], slug: FromPath[str]) -> KeyList:
    """A tenant's keys, by their first characters."""
    return KeyList(await keys.list(slug))


@delete("/admin/tenants/{slug:str}/keys/{key_id:int}", guards=ADMIN, status_code=200)
async def revoke_key(
    request: AuthorizedRequest,
    keys: NamedDependency[KeyService],
    slug: FromPath[str],
    key_id: FromPath[int],
) -> KeyView:
    """Revoke a key; it stops working within a second everywhere."""
    return await keys.revoke(slug, key_id, author=request.auth.author)


@get("/admin/usage", guards=ADMIN)
async def usage_totals(
    usage: NamedDependency[UsageService],
    tenants: NamedDependency[TenantService],
    tenant: FromQuery[str | None] = None,
    adapter: FromQuery[str | None] = None,
    revision: FromQuery[int | None] = None,
    since: FromQuery[datetime | None] = None,
    until: FromQuery[datetime | None] = None,
    group_by: FromQuery[list[Literal["tenant", "adapter", "revision"]] | None] = None,
) -> UsageTotals:
    """Sums of usage, filtered and grouped."""
    tenant_id = None if tenant is None else (await tenants.get(tenant)).id
    totals = await usage.totals(
        UsageFilter(
            tenant_id=tenant_id,
            adapter=adapter,
            revision=revision,
            since=since,
            until=until,
        ),
        group_by=group_by or (),
    )
    return UsageTotals(totals)


@get("/admin/usage/requests", guards=ADMIN)
async def usage_rows(
    usage: NamedDependency[UsageService],
    tenants: NamedDependency[TenantService],
    tenant: FromQuery[str | None] = None,
    adapter: FromQuery[str | None] = None,
    revision: FromQuery[int | None] = None,
    since: FromQuery[datetime | None] = None,
    until: FromQuery[datetime | None] = None,
    limit: FromQuery[int] = 100,
) -> UsageRows:
    """Usage request by request."""
    tenant_id = None if tenant is None else (await tenants.get(tenant)).id
    rows = await usage.rows(
        UsageFilter(
            tenant_id=tenant_id,
            adapter=adapter,
            revision=revision,
            since=since,
            until=until,
        ),
        limit=limit,
    )
    return UsageRows(rows)


@get("/admin/audit", guards=ADMIN)
async def audit_trail(
    audit: NamedDependency[AuditService],
    tenants: NamedDependency[TenantService],
    tenant: FromQuery[str | None] = None,
    before_id: FromQuery[int | None] = None,
    limit: FromQuery[int] = 100,
) -> AuditTrail:
    """The audit trail."""
    tenant_id = None if tenant is None else (await tenants.get(tenant)).id
    return AuditTrail(await audit.entries(tenant_id=tenant_id, before_id=before_id, limit=limit))


@get("/admin/capabilities", guards=ADMIN)
async def capabilities(engine: NamedDependency[EnginePool]) -> CapabilityList:
    """Which implementation of each op runs, how often, and every fallback."""
    return CapabilityList((await _snapshot(engine)).capabilities)


@get("/admin/engine", guards=ADMIN)
async def engine_snapshot(engine: NamedDependency[EnginePool]) -> Snapshot:
    """Everything that the engine holds now."""
    return await _snapshot(engine)


@get("/admin/residency", guards=ADMIN)
async def residency(
    engine: NamedDependency[EnginePool], snapshots: NamedDependency[SnapshotService]
) -> ResidencyList:
    """Which revisions are on the device."""
    names: dict[str, list[str]] = {}
    for key, adapter in snapshots.current.adapters.items():
        for revision in adapter.revisions.values():
            label = f"{key.tenant}/{key.name}@{revision.number}"
            names.setdefault(revision.source.digest, []).append(label)
    held = (await _snapshot(engine)).adapters
    return ResidencyList(
        tuple(
            ResidentRevision(residency=r, revisions=tuple(sorted(names.get(r.digest, ()))))
            for r in held
        )
    )


async def _snapshot(engine: EnginePool) -> Snapshot:
    try:
        return await engine.snapshot()
    except EngineUnavailableError as error:
        raise EngineUnavailable(str(error), retry_after=error.retry_after) from error


ADMIN_ROUTES = [
    create_tenant,
    list_tenants,
    get_tenant,
    change_tenant,
    issue_key,
    list_keys,
    revoke_key,
    usage_totals,
    usage_rows,
    audit_trail,
    capabilities,
    engine_snapshot,
    residency,
]
