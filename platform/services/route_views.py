"""What the services of routes, gates and share groups hand out: immutable values."""

from datetime import datetime

import msgspec

from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.snapshot import RouteTarget


class RouteView(msgspec.Struct, frozen=True, kw_only=True):
    """A route at one of its versions, counted from 1; the newest is in force.

    targets: none if this version deleted the route.  drafts: how tokens are drafted for requests
    that do not say; None for the server's way.  restores: the version that a rollback went back to.
    route_version: of all routing state, as answers carry it, from which on it held.
    """

    name: str
    version: int
    targets: tuple[RouteTarget, ...]
    drafts: DraftPolicy | None
    author: str
    reason: str | None
    restores: int | None
    route_version: int
    changed_at: datetime


class TargetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One target of a planned change.

    revision: what it resolves to now, `<adapter>@<number>` or the base's name; None if it does not.
    share_before, share_after: of the route's conversations, 0 to 1.  refusal: why the change would
    be refused.
    """

    model: str
    revision: str | None
    share_before: float
    share_after: float
    refusal: str | None = None


class RoutePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a change would do. `from_version`: the version in force, None for a new route.
    `refusals`: all reasons why it would be refused; empty if it would be made."""

    name: str
    from_version: int | None
    targets: tuple[TargetPlan, ...]
    refusals: tuple[str, ...]


class MemberView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant in a group. `mount`: what it calls the group; None until it has accepted."""

    tenant: str
    mount: str | None


class SharedRevisionView(msgspec.Struct, frozen=True, kw_only=True):
    """A shared revision of one of the owner's adapters."""

    adapter: str
    revision: int
    digest: str


class ShareGroupView(msgspec.Struct, frozen=True, kw_only=True):
    """A group as its owner or one of its members sees it.

    id: names its prefix cache, and the invitation.  mount: what the asking tenant calls it, None
    for an invitation.  members: the owner sees all, a member itself.
    """

    id: str
    name: str
    owner: str
    mount: str | None
    shares_base: bool
    revisions: tuple[SharedRevisionView, ...]
    members: tuple[MemberView, ...]
    created_at: datetime
