"""Promotion gates: golden prompts of an adapter or a route that a candidate must answer first.

An adapter's gate stands before every move of its aliases, a route's before every target that is new
to it, by whatever change it comes. A rollback is not gated: it restores what was in force.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.platform.clock import Clock, system_clock, utc
from polyloom.platform.db.engine import Database
from polyloom.platform.db.repositories import AdapterRepository
from polyloom.platform.db.route_models import GateRow, GateRunRow
from polyloom.platform.db.route_repositories import GateRepository, RouteRepository
from polyloom.platform.errors import Conflict, GateFailed, NotFound
from polyloom.platform.generation.golden import GoldenPrompt, GoldenResult, check_prompts
from polyloom.platform.services.audit import note
from polyloom.platform.services.route_views import RoutePlan
from polyloom.platform.services.views import TenantView
from polyloom.routing.impact import routes_moved
from polyloom.routing.resolver import Resolution, resolve_candidate, resolve_target
from polyloom.routing.snapshot import RouteKey, RouteSnapshot

RUNS_SHOWN = 50

RunPrompts = Callable[
    [TenantView, Resolution, Sequence[GoldenPrompt]], Awaitable[tuple[GoldenResult, ...]]
]


@dataclass(frozen=True)
class Subject:
    """What a gate stands before: an adapter or a route, by its row's id."""

    adapter_id: int | None = None
    route_id: int | None = None


GateVersion = tuple[tuple[Subject, int], ...]
"""Gates that were passed, each at its version then; 0 where there was none."""


class GateView(msgspec.Struct, frozen=True, kw_only=True):
    """A gate. `version` counts its changes; without prompts everything passes."""

    version: int
    prompts: tuple[GoldenPrompt, ...]
    author: str
    changed_at: datetime


class GateRunView(msgspec.Struct, frozen=True, kw_only=True):
    """One candidate's answers, up to the first that was not as expected."""

    candidate: str
    gate_version: int
    passed: bool
    results: tuple[GoldenResult, ...]
    author: str
    created_at: datetime


class GateService:
    """Keeps gates, and has candidates pass them."""

    def __init__(self, database: Database, run: RunPrompts, *, clock: Clock = system_clock) -> None:
        """run: has a candidate answer prompts, up to the first that fails."""
        self._database = database
        self._run = run
        self._clock = clock

    async def put(
        self,
        tenant: TenantView,
        prompts: Sequence[GoldenPrompt],
        *,
        adapter: str | None = None,
        route: str | None = None,
        author: str,
    ) -> GateView:
        """Replace the prompts of an adapter's or a route's gate; none opens it. Raises
        InvalidRequest (prompts), NotFound."""
        check_prompts(prompts)
        async with self._database.write() as session:
            subject = await _subject(session, tenant.id, adapter, route)
            gates = GateRepository(session)
            row = await gates.of(adapter_id=subject.adapter_id, route_id=subject.route_id)
            if row is None:
                row = GateRow(adapter_id=subject.adapter_id, route_id=subject.route_id, version=0)
            before = row.version or None
            row.version, row.author = row.version + 1, author
            row.prompts, row.created_at = msgspec.to_builtins(prompts), utc(self._clock)
            await gates.add(row)
            note(
                session,
                author=author,
                action="gate.put",
                target=f"adapter:{adapter}" if route is None else f"route:{route}",
                tenant_id=tenant.id,
                before=before,
                after=row.version,
            )
            return _view(row)

    async def get(
        self, tenant: TenantView, *, adapter: str | None = None, route: str | None = None
    ) -> GateView:
        """Raises NotFound."""
        async with self._database.read() as session:
            return _view(await _gate(session, tenant.id, adapter, route))

    async def runs(
        self, tenant: TenantView, *, adapter: str | None = None, route: str | None = None
    ) -> tuple[GateRunView, ...]:
        """The latest runs, newest first. Raises NotFound."""
        async with self._database.read() as session:
            gate = await _gate(session, tenant.id, adapter, route)
            rows = await GateRepository(session).runs(gate.id, RUNS_SHOWN)
            return tuple(_run_view(row) for row in rows)

    async def check_alias(
        self,
        tenant: TenantView,
        adapter: str,
        alias: str,
        number: int,
        snapshot: RouteSnapshot,
        *,
        author: str,
    ) -> GateVersion:
        """Have revision `number` pass the adapter's gate, and those of the routes that the move
        would lead to it. Raises GateFailed, EngineUnavailable, RateLimited, RoutingError."""
        async with self._database.read() as session:
            subjects = [await _subject(session, tenant.id, adapter, None)]
            for route in routes_moved(snapshot, tenant.slug, adapter, alias, number):
                subjects.append(await _subject(session, tenant.id, None, route))
            gates = await _gates(session, subjects)
        if any(gate.prompts for _, gate in gates):
            candidate = resolve_candidate(snapshot, tenant.slug, adapter, number)
            for _, gate in gates:
                await self._pass(tenant, gate, [candidate], author)
        return _versions(subjects, gates)

    async def check_route(
        self,
        tenant: TenantView,
        route: str,
        snapshot: RouteSnapshot,
        plan: RoutePlan,
        *,
        author: str,
    ) -> GateVersion:
        """Have the targets that are new to the route pass its gate. Raises what `check_alias`
        does."""
        async with self._database.read() as session:
            row = await RouteRepository(session).named(tenant.id, route)
            if row is None:
                return ()
            subjects = [Subject(route_id=row.id)]
            gates = await _gates(session, subjects)
        for _, gate in gates:
            await self._pass(tenant, gate, _new_targets(snapshot, tenant.slug, plan), author)
        return _versions(subjects, gates)

    async def require(self, session: AsyncSession, passed: GateVersion) -> None:
        """Raises Conflict if a gate has changed since it was passed."""
        now = await _gates(session, [subject for subject, _ in passed])
        if _versions([subject for subject, _ in passed], now) != passed:
            raise Conflict("the gate changed while it was being passed: try again")

    async def _pass(
        self, tenant: TenantView, gate: GateRow, candidates: Iterable[Resolution], author: str
    ) -> None:
        prompts = _view(gate).prompts
        for candidate in candidates if prompts else ():
            results = await self._run(tenant, candidate, prompts)
            failed = next((result for result in results if not result.passed), None)
            async with self._database.write() as session:
                session.add(self._row(gate, candidate, results, author))
            if failed is not None:
                raise GateFailed(
                    f"{candidate.label} does not pass the gate: the answer to {failed.name!r} was"
                    f" expected to be one that {failed.expected}; it is {failed.got!r}",
                    param=failed.name,
                )

    def _row(
        self,
        gate: GateRow,
        candidate: Resolution,
        results: Sequence[GoldenResult],
        author: str,
    ) -> GateRunRow:
        return GateRunRow(
            gate_id=gate.id,
            gate_version=gate.version,
            candidate=candidate.label,
            adapter_digest=candidate.combination.adapter_digest,
            passed=all(result.passed for result in results),
            results=msgspec.to_builtins(results),
            author=author,
            created_at=utc(self._clock),
        )


def _new_targets(snapshot: RouteSnapshot, tenant: str, plan: RoutePlan) -> list[Resolution]:
    """What the plan's targets with a share resolve to, without what the route leads to already."""
    present = snapshot.routes.get(RouteKey(tenant, plan.name))
    known = {t.revision for t in plan.targets if t.share_before > 0} if present else set()
    models = [t.model for t in plan.targets if t.share_after > 0 and t.revision not in known]
    found = [resolve_target(snapshot, tenant, model) for model in models]
    return list({resolution.combination: resolution for resolution in found}.values())


async def _gates(
    session: AsyncSession, subjects: Sequence[Subject]
) -> list[tuple[Subject, GateRow]]:
    gates = GateRepository(session)
    found = [(s, await gates.of(adapter_id=s.adapter_id, route_id=s.route_id)) for s in subjects]
    return [(subject, gate) for subject, gate in found if gate is not None]


def _versions(subjects: Sequence[Subject], gates: Sequence[tuple[Subject, GateRow]]) -> GateVersion:
    known = {subject: gate.version for subject, gate in gates}
    return tuple((subject, known.get(subject, 0)) for subject in subjects)


async def _subject(
    session: AsyncSession, tenant_id: int, adapter: str | None, route: str | None
) -> Subject:
    if adapter is not None:
        owner = await AdapterRepository(session).named(tenant_id, adapter)
        if owner is None:
            raise NotFound(f"no adapter {adapter!r}")
        return Subject(adapter_id=owner.id)
    row = await RouteRepository(session).named(tenant_id, route or "")
    if row is None:
        raise NotFound(f"no route {route!r}")
    return Subject(route_id=row.id)


async def _gate(
    session: AsyncSession, tenant_id: int, adapter: str | None, route: str | None
) -> GateRow:
    subject = await _subject(session, tenant_id, adapter, route)
    row = await GateRepository(session).of(adapter_id=subject.adapter_id, route_id=subject.route_id)
    if row is None:
        raise NotFound("there is no gate")
    return row


def _view(row: GateRow) -> GateView:
    return GateView(
        version=row.version,
        prompts=msgspec.convert(row.prompts, tuple[GoldenPrompt, ...]),
        author=row.author,
        changed_at=row.created_at,
    )


def _run_view(row: GateRunRow) -> GateRunView:
    return GateRunView(
        candidate=row.candidate,
        gate_version=row.gate_version,
        passed=row.passed,
        results=msgspec.convert(row.results, tuple[GoldenResult, ...]),
        author=row.author,
        created_at=row.created_at,
    )
