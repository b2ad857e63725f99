"""Several engines' statuses and snapshots as one."""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from polyloom.platform.engine.messages import AdapterResidency, Capability, Snapshot, Status


def sum_statuses(statuses: Sequence[Status]) -> Status:
    """Numbers added, the latest time, `draining` if all are. At least one is needed."""
    values: dict[str, object] = {}
    for name in Status.__struct_fields__:
        column = [getattr(status, name) for status in statuses]
        if isinstance(column[0], dict):
            values[name] = _added(column)
        elif name == "quarantined":
            values[name] = tuple(sorted(set().union(*column)))
        else:
            values[name] = sum(column)
    values["time"] = max(status.time for status in statuses)
    values["draining"] = all(status.draining for status in statuses)
    return msgspec.convert(values, Status)


def sum_snapshots(snapshots: Sequence[Snapshot]) -> Snapshot:
    """What all hold together. An adapter on several engines is one entry."""
    if len(snapshots) == 1:
        return snapshots[0]
    return Snapshot(
        status=sum_statuses([snapshot.status for snapshot in snapshots]),
        sequences=tuple(name for snapshot in snapshots for name in snapshot.sequences),
        adapters=_adapters(adapter for snapshot in snapshots for adapter in snapshot.adapters),
        capabilities=_capabilities(c for snapshot in snapshots for c in snapshot.capabilities),
    )


def _added(columns: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for column in columns:
        for name, value in column.items():
            total[name] += value
    return dict(total)


def _adapters(adapters: Iterable[AdapterResidency]) -> tuple[AdapterResidency, ...]:
    found: dict[str, AdapterResidency] = {}
    for adapter in adapters:
        known = found.get(adapter.digest)
        if known is not None:
            resident = "resident" in (known.state, adapter.state)
            adapter = AdapterResidency(
                digest=adapter.digest,
                state="resident" if resident else adapter.state,
                pinned_by=known.pinned_by + adapter.pinned_by,
                pages=known.pages + adapter.pages,
                bytes=known.bytes + adapter.bytes,
                requests=known.requests + adapter.requests,
            )
        found[adapter.digest] = adapter
    return tuple(found.values())


def _capabilities(capabilities: Iterable[Capability]) -> tuple[Capability, ...]:
    found: dict[tuple[str, str], Capability] = {}
    for one in capabilities:
        known = found.get((one.name, one.implementation))
        if known is not None:
            fallbacks = _added([known.fallbacks, one.fallbacks])
            engaged = known.engaged + one.engaged
            one = msgspec.structs.replace(one, engaged=engaged, fallbacks=fallbacks)
        found[(one.name, one.implementation)] = one
    return tuple(found.values())
