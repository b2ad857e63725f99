"""`GET /v1/models`: the base first, then the tenant's own routes and adapters, then what its share
groups bring."""

import contextlib
from collections.abc import Iterator

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath

from polyloom.platform.api.guards import AuthorizedRequest, requires, tenant_of
from polyloom.platform.api.paths import name_in_path
from polyloom.platform.api.schemas import Model, ModelList
from polyloom.platform.services.snapshots import SnapshotService
from polyloom.routing.errors import RoutingError
from polyloom.routing.names import DEFAULT_ALIAS
from polyloom.routing.resolver import resolve
from polyloom.routing.snapshot import AdapterEntry, RouteSnapshot


@get("/v1/models", guards=[requires("inference")])
async def list_models(
    request: AuthorizedRequest, snapshots: NamedDependency[SnapshotService]
) -> ModelList:
    """Every `model` that this key can use: bases, routes, adapters with a `prod` alias, each alias
    and ready revision by its full name, and what is shared."""
    return ModelList(list(_models(snapshots.current, tenant_of(request.auth).slug)))


@get("/v1/models/{model:str}", guards=[requires("inference")])
async def get_model(
    request: AuthorizedRequest, snapshots: NamedDependency[SnapshotService], model: FromPath[str]
) -> Model:
    """One model by any name that a request could use."""
    tenant = tenant_of(request.auth).slug
    name = name_in_path(model)
    found = resolve(snapshots.current, tenant, name)
    is_own = found.adapter_name is not None or found.route is not None
    return _model(name, tenant if is_own else None, found.base_name)


def _models(snapshot: RouteSnapshot, tenant: str) -> Iterator[Model]:
    names = {base.digest: base.name for base in snapshot.bases.values()}
    for base in snapshot.bases.values():
        yield _model(base.name, None, base.name)
    for route in sorted(key.name for key in snapshot.routes if key.tenant == tenant):
        yield from _if_served(snapshot, tenant, route)
    for key, adapter in sorted(snapshot.adapters.items(), key=lambda item: item[0].name):
        if key.tenant == tenant:
            yield from _adapter_models(adapter, tenant, names)
    yield from _shared_models(snapshot, tenant)


def _shared_models(snapshot: RouteSnapshot, tenant: str) -> Iterator[Model]:
    for key, group in sorted(snapshot.groups.items(), key=lambda item: item[0].mount):
        if key.tenant == tenant:
            bases = snapshot.bases if group.shares_base else ()
            for name in (*bases, *sorted(group.revisions)):
                yield from _if_served(snapshot, tenant, f"{key.mount}/{name}")


def _if_served(snapshot: RouteSnapshot, tenant: str, name: str) -> Iterator[Model]:
    with contextlib.suppress(RoutingError):
        yield _model(name, tenant, resolve(snapshot, tenant, name).base_name)


def _adapter_models(adapter: AdapterEntry, tenant: str, bases: dict[str, str]) -> Iterator[Model]:
    usable = {
        number: bases[revision.base_digest]
        for number, revision in sorted(adapter.revisions.items())
        if revision.state == "ready" and revision.base_digest in bases
    }
    for alias, number in sorted(adapter.aliases.items()):
        if number in usable:
            name = adapter.name if alias == DEFAULT_ALIAS else f"{adapter.name}@{alias}"
            yield _model(name, tenant, usable[number])
    for number, base in usable.items():
        yield _model(f"{adapter.name}@{number}", tenant, base)


def _model(name: str, tenant: str | None, base: str) -> Model:
    return Model(
        id=name,
        created=0,
        owned_by=tenant or "polyloom",
        root=base,
        parent=None if tenant is None else base,
    )
