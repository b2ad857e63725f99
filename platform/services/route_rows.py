"""Rows of routes and share groups as the values that the services hand out."""

import msgspec

from polyloom.platform.db.route_models import RouteChangeRow, RouteRow, ShareGroupRow
from polyloom.platform.services.route_views import (
    MemberView,
    RouteView,
    SharedRevisionView,
    ShareGroupView,
)
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.snapshot import MountKey, RouteEntry, RouteTarget, ShareGroupEntry


def targets_of(row: RouteChangeRow) -> tuple[RouteTarget, ...]:
    """Needs nothing loaded beside the row."""
    return tuple(msgspec.convert(target, RouteTarget) for target in row.targets)


def drafts_of(row: RouteChangeRow) -> DraftPolicy | None:
    """How the route's requests are drafted for. Needs nothing loaded beside the row."""
    return None if row.drafts is None else msgspec.convert(row.drafts, DraftPolicy, strict=False)


def route_view(row: RouteRow, change: RouteChangeRow) -> RouteView:
    """Needs nothing loaded beside the rows."""
    return RouteView(
        name=row.name,
        version=change.version,
        targets=targets_of(change),
        drafts=drafts_of(change),
        author=change.author,
        reason=change.reason,
        restores=change.restores,
        route_version=change.route_version,
        changed_at=change.created_at,
    )


def route_entry(row: RouteRow) -> RouteEntry:
    """A route as the resolver sees it, without targets if it is deleted. Needs its newest change
    loaded."""
    return RouteEntry(row.name, row.version, targets_of(row.current), drafts_of(row.current))


def group_entries(row: ShareGroupRow) -> dict[MountKey, ShareGroupEntry]:
    """A group as the resolver sees it, under each accepted member's name for it. Needs all that is
    in it loaded."""
    if row.deleted_at is not None:
        return {}
    entry = ShareGroupEntry(
        uid=row.uid,
        owner=row.owner.slug,
        revisions={shared.adapter.name: shared.revision.number for shared in row.revisions},
        shares_base=row.shares_base,
    )
    return {
        MountKey(member.tenant.slug, member.mount): entry
        for member in row.members
        if member.mount is not None
    }


def group_view(row: ShareGroupRow, tenant_id: int) -> ShareGroupView:
    """The group as the tenant sees it. Needs all that is in it loaded."""
    is_owner = row.owner_id == tenant_id
    seen = [m for m in row.members if is_owner or m.tenant_id == tenant_id]
    mine = next((m.mount for m in row.members if m.tenant_id == tenant_id), None)
    return ShareGroupView(
        id=row.uid,
        name=row.name,
        owner=row.owner.slug,
        mount=mine,
        shares_base=row.shares_base,
        revisions=tuple(
            SharedRevisionView(
                adapter=shared.adapter.name,
                revision=shared.revision.number,
                digest=shared.revision.digest,
            )
            for shared in row.revisions
        ),
        members=tuple(MemberView(tenant=m.tenant.slug, mount=m.mount) for m in seen),
        created_at=row.created_at,
    )
