"""Which routes a change of revisions or aliases reaches."""

from collections.abc import Iterator
from types import MappingProxyType

import msgspec

from polyloom.routing.errors import RoutingError
from polyloom.routing.resolver import Resolution, resolve_target
from polyloom.routing.snapshot import AdapterKey, RouteEntry, RouteSnapshot


def routes_on(snapshot: RouteSnapshot, tenant: str, adapter: str, number: int) -> tuple[str, ...]:
    """The tenant's routes that give this revision of its adapter a share now, by name."""
    return tuple(
        route.name
        for route in _routes_of(snapshot, tenant)
        for found in (_resolved(snapshot, tenant, route),)
        if any((f.adapter_name, f.revision) == (adapter, number) for f in found.values())
    )


def routes_moved(
    snapshot: RouteSnapshot, tenant: str, adapter: str, alias: str, number: int
) -> tuple[str, ...]:
    """The tenant's routes that would newly lead to revision `number` if `alias` pointed at it."""
    moved = with_alias(snapshot, tenant, adapter, alias, number)
    return tuple(
        route.name
        for route in _routes_of(snapshot, tenant)
        if _newly(_resolved(snapshot, tenant, route), _resolved(moved, tenant, route))
    )


def with_alias(
    snapshot: RouteSnapshot, tenant: str, adapter: str, alias: str, number: int
) -> RouteSnapshot:
    """The snapshot as it would be with the alias at revision `number`, ready; both the adapter and
    the revision are in it."""
    key = AdapterKey(tenant, adapter)
    entry = snapshot.adapters[key]
    revision = msgspec.structs.replace(entry.revisions[number], state="ready")
    moved = msgspec.structs.replace(
        entry,
        revisions=MappingProxyType({**entry.revisions, number: revision}),
        aliases=MappingProxyType({**entry.aliases, alias: number}),
    )
    return msgspec.structs.replace(
        snapshot, adapters=MappingProxyType({**snapshot.adapters, key: moved})
    )


def _routes_of(snapshot: RouteSnapshot, tenant: str) -> Iterator[RouteEntry]:
    for key in sorted(snapshot.routes, key=lambda key: key.name):
        if key.tenant == tenant:
            yield snapshot.routes[key]


def _resolved(snapshot: RouteSnapshot, tenant: str, route: RouteEntry) -> dict[str, Resolution]:
    """What the targets with a share resolve to, by their models; those that do not are left out."""
    found: dict[str, Resolution] = {}
    for target in route.targets:
        if target.weight > 0:
            try:
                found[target.model] = resolve_target(snapshot, tenant, target.model)
            except RoutingError:
                continue
    return found


def _newly(before: dict[str, Resolution], after: dict[str, Resolution]) -> bool:
    labels = {found.label for found in before.values()}
    return any(found.label not in labels for found in after.values())
