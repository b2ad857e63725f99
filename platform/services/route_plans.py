"""What a change of a route would do, from a snapshot alone."""

from collections.abc import Sequence

from polyloom.platform.errors import Conflict, InvalidRequest
from polyloom.platform.services.route_views import RoutePlan, TargetPlan
from polyloom.routing.drafts import MAX_DRAFT_TOKENS, DraftPolicy
from polyloom.routing.errors import RoutingError
from polyloom.routing.names import is_name
from polyloom.routing.resolver import resolve_target
from polyloom.routing.snapshot import AdapterKey, RouteKey, RouteSnapshot, RouteTarget

MAX_TARGETS = 16
LARGEST_WEIGHT = 1_000_000


def check_targets(name: str, targets: Sequence[RouteTarget]) -> None:
    """Raises InvalidRequest (name, targets) for what can be no route whatever there is."""
    if not is_name(name):
        raise InvalidRequest(
            "a route's name has 1 to 128 letters, digits and ._:/-, and begins with a letter or"
            " digit",
            param="name",
        )
    if not 0 < len(targets) <= MAX_TARGETS:
        raise InvalidRequest(f"a route has 1 to {MAX_TARGETS} targets", param="targets")
    for index, target in enumerate(targets):
        if not 0 <= target.weight <= LARGEST_WEIGHT:
            raise InvalidRequest(
                f"{target.weight} is not between 0 and {LARGEST_WEIGHT}",
                param=f"targets[{index}].weight",
            )
    if not any(target.weight for target in targets):
        raise InvalidRequest("one target at least has a weight above 0", param="targets")
    if len({target.model for target in targets}) < len(targets):
        raise InvalidRequest("two targets name the same model", param="targets")


def check_drafts(drafts: DraftPolicy | None) -> None:
    """Raises InvalidRequest (drafts)."""
    if isinstance(drafts, int) and not 0 <= drafts <= MAX_DRAFT_TOKENS:
        raise InvalidRequest(f"{drafts} is not between 0 and {MAX_DRAFT_TOKENS}", param="drafts")


def plan_change(
    snapshot: RouteSnapshot, tenant: str, name: str, targets: Sequence[RouteTarget]
) -> RoutePlan:
    """What changing the route `name` of `tenant` (a slug) to `targets` would do."""
    present = snapshot.routes.get(RouteKey(tenant, name))
    before = () if present is None else present.targets
    shares_before, shares_after = _shares(before), _shares(targets)
    removed = [t.model for t in before if t.model not in shares_after]
    plans = [
        _target(snapshot, tenant, model, shares_before.get(model, 0.0), shares_after[model])
        for model in shares_after
    ]
    refusals = _collisions(snapshot, tenant, name)
    refusals += [f"{plan.model!r}: {plan.refusal}" for plan in plans if plan.refusal]
    gone = [_gone(snapshot, tenant, model, shares_before[model]) for model in removed]
    return RoutePlan(
        name=name,
        from_version=None if present is None else present.version,
        targets=(*plans, *gone),
        refusals=tuple(refusals),
    )


def require(plan: RoutePlan) -> None:
    """Raises Conflict with the first reason why the change would be refused."""
    for index, target in enumerate(plan.targets):
        if target.refusal is not None:
            raise Conflict(target.refusal, param=f"targets[{index}].model")
    if plan.refusals:
        raise Conflict(plan.refusals[0], param="name")


def _shares(targets: Sequence[RouteTarget]) -> dict[str, float]:
    total = sum(target.weight for target in targets)
    return {target.model: target.weight / total for target in targets}


def _collisions(snapshot: RouteSnapshot, tenant: str, name: str) -> list[str]:
    if name in snapshot.bases:
        return [f"{name!r} is the name of a base"]
    if AdapterKey(tenant, name) in snapshot.adapters:
        return [f"{name!r} is the name of an adapter"]
    return []


def _target(
    snapshot: RouteSnapshot, tenant: str, model: str, before: float, after: float
) -> TargetPlan:
    revision, refusal = None, None
    try:
        revision = resolve_target(snapshot, tenant, model).label
    except RoutingError as error:
        refusal = error.message
    return TargetPlan(
        model=model,
        revision=revision,
        share_before=before,
        share_after=after,
        refusal=refusal,
    )


def _gone(snapshot: RouteSnapshot, tenant: str, model: str, before: float) -> TargetPlan:
    """A target that the change takes away: whether it still resolves is no reason to refuse."""
    plan = _target(snapshot, tenant, model, before, 0.0)
    return TargetPlan(model=model, revision=plan.revision, share_before=before, share_after=0.0)
