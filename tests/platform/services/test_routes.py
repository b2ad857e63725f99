"""Routes: every change a version, rollback chooses an older one, and no target leads nowhere."""

import asyncio
from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text as sql
from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.platform.coordination.announcements import Announcements
from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.engine.messages import Invalidate
from polyloom.platform.errors import Conflict, GateFailed, InvalidRequest, NotFound
from polyloom.platform.generation.golden import Expectation, GoldenPrompt
from polyloom.platform.services.retirement import Retirement
from polyloom.platform.services.route_views import RouteView
from polyloom.platform.services.snapshots import SnapshotService
from polyloom.platform.services.views import FidelityVerdict, TenantView
from polyloom.routing.errors import ModelNotFound, RevisionRetired
from polyloom.routing.resolver import resolve
from polyloom.routing.snapshot import RouteTarget

if TYPE_CHECKING:
    from conftest import Process

BASE = "sha256:" + "b" * 64
PASSED = FidelityVerdict(max_logprob_diff=1e-5)


class Engine:
    """Notes what it is asked to unload."""

    def __init__(self) -> None:
        self.retired: list[str] = []

    async def retire(self, adapter_digest: str) -> None:
        self.retired.append(adapter_digest)

    async def invalidate(self, command: Invalidate, *, author: str) -> None:
        """Nothing is cached."""


def to(*targets: tuple[str, int]) -> list[RouteTarget]:
    return [RouteTarget(model, weight) for model, weight in targets]


async def acme_with_three(process: "Process") -> TenantView:
    acme = await process.tenant()
    for text in ("a", "b", "c"):
        await process.ready(acme, text)
    await process.aliases.move(acme.id, "support", "prod", 1, author="key:1")
    return acme


def label(process: "Process", model: str = "chat", session: str = "s") -> str:
    return resolve(process.snapshots.current, "acme", model, session).label


async def test_a_route_is_in_force_when_put_returns_and_keeps_its_history(
    process: "Process",
) -> None:
    acme = await acme_with_three(process)
    first = await process.routes.put(acme, "chat", to(("support@1", 1)), author="key:1")
    assert label(process) == "support@1"
    assert first.route_version == process.snapshots.current.version
    await process.routes.put(
        acme, "chat", to(("support@2", 1)), author="key:2", reason="the new one"
    )
    assert label(process) == "support@2"
    again = await process.routes.put(acme, "chat", to(("support@2", 1)), author="key:3")
    assert (again.version, again.author) == (2, "key:2")
    history = await process.routes.versions(acme, "chat")
    assert [(v.version, v.author, v.reason) for v in history] == [
        (2, "key:2", "the new one"),
        (1, "key:1", None),
    ]
    assert [route.name for route in await process.routes.list(acme.id)] == ["chat"]
    actions = [e.action for e in await process.audit.entries(tenant_id=acme.id, limit=2)]
    assert actions == ["route.put", "route.put"]


async def test_rollback_goes_back_step_by_step_and_revives_what_was_deleted(
    process: "Process",
) -> None:
    acme = await acme_with_three(process)
    for number in (1, 2, 3):
        await process.routes.put(acme, "chat", to((f"support@{number}", 1)), author="key:1")
    seen = []
    for _ in range(2):
        view = await process.routes.rollback(acme, "chat", author="key:1")
        seen.append((view.version, view.restores, label(process)))
    assert seen == [(4, 2, "support@2"), (5, 1, "support@1")]
    with pytest.raises(Conflict, match="no older version"):
        await process.routes.rollback(acme, "chat", author="key:1")
    back = await process.routes.rollback(acme, "chat", to=3, author="key:1", reason="after all")
    assert (back.version, back.restores, label(process)) == (6, 3, "support@3")
    await process.routes.delete(acme, "chat", author="key:1")
    with pytest.raises(ModelNotFound):
        label(process)
    with pytest.raises(NotFound):
        await process.routes.get(acme, "chat")
    assert await process.routes.list(acme.id) == ()
    revived = await process.routes.rollback(acme, "chat", author="key:1")
    assert (revived.version, label(process)) == (8, "support@3")


async def test_how_requests_are_drafted_for_is_part_of_a_version(process: "Process") -> None:
    acme = await acme_with_three(process)

    def drafts() -> object:
        return resolve(process.snapshots.current, "acme", "chat").drafts

    for policy in (None, 4, "off", "off"):
        view = await process.routes.put(
            acme, "chat", to(("support@1", 1)), drafts=policy, author="key:1"
        )
        assert (view.drafts, drafts()) == (policy, policy)
    assert view.version == 3
    assert (await process.routes.rollback(acme, "chat", author="key:1")).restores == 2
    assert drafts() == 4
    with pytest.raises(InvalidRequest) as refused:
        await process.routes.put(acme, "chat", to(("support@1", 1)), drafts=32, author="key:1")
    assert refused.value.param == "drafts"


async def test_a_dry_run_says_what_would_change_and_writes_nothing(process: "Process") -> None:
    acme = await acme_with_three(process)
    await process.routes.put(acme, "chat", to(("support@1", 9), ("support@2", 1)), author="key:1")
    version = process.snapshots.current.version
    plan = await process.routes.plan(acme, "chat", to(("support@2", 1), ("support@9", 1)))
    assert (plan.name, plan.from_version) == ("chat", 1)
    told = {t.model: (t.revision, t.share_before, t.share_after) for t in plan.targets}
    assert told == {
        "support@2": ("support@2", 0.1, 0.5),
        "support@9": (None, 0.0, 0.5),
        "support@1": ("support@1", 0.9, 0.0),
    }
    assert plan.refusals == ("'support@9': The model 'support@9' does not exist",)
    assert (await process.snapshots.refresh()).version == version
    assert len(await process.routes.versions(acme, "chat")) == 1
    assert process.golden.asked == []


@pytest.mark.parametrize(
    ("target", "why"), [("other", "does not exist"), ("support@4", "exist"), ("chat", "exist")]
)
async def test_a_target_that_leads_nowhere_is_refused(
    process: "Process", target: str, why: str
) -> None:
    acme = await acme_with_three(process)
    with pytest.raises(Conflict, match=why) as caught:
        await process.routes.put(acme, "chat", to(("support@1", 1), (target, 1)), author="key:1")
    assert caught.value.param == "targets[1].model"
    assert await process.routes.list(acme.id) == ()


@pytest.mark.parametrize(
    ("name", "targets", "param"),
    [
        ("a@b", to(("tiny", 1)), "name"),
        ("chat", [], "targets"),
        ("chat", to(("tiny", 0)), "targets"),
        ("chat", to(("tiny", -1)), "targets[0].weight"),
        ("chat", to(("tiny", 1), ("tiny", 2)), "targets"),
        ("chat", to(*((f"support@{i}", 1) for i in range(17))), "targets"),
    ],
)
async def test_what_can_be_no_route_is_refused_by_its_field(
    process: "Process", name: str, targets: list[RouteTarget], param: str
) -> None:
    acme = await process.tenant()
    for call in (
        process.routes.put(acme, name, targets, author="key:1"),
        process.routes.plan(acme, name, targets),
    ):
        with pytest.raises(InvalidRequest) as caught:
            await call
        assert caught.value.param == param


async def test_a_name_means_one_thing(process: "Process") -> None:
    acme = await acme_with_three(process)
    for taken in ("support", "tiny"):
        with pytest.raises(Conflict, match="is the name of"):
            await process.routes.put(acme, taken, to(("support@1", 1)), author="key:1")
    await process.routes.put(acme, "chat", to(("support@1", 1)), author="key:1")
    with pytest.raises(Conflict, match="name of a route"):
        await process.upload(acme, "d", "chat")
    await process.routes.delete(acme, "chat", author="key:1")
    await process.upload(acme, "d", "chat")
    with pytest.raises(Conflict, match="name of an adapter"):
        await process.routes.rollback(acme, "chat", author="key:1")
    globex = await process.tenant("globex")
    await process.routes.put(globex, "support", to(("tiny", 1)), author="key:2")
    assert resolve(process.snapshots.current, "globex", "support").label == "tiny"
    assert label(process, "support") == "support@1"


@pytest.mark.parametrize("target", ["support@1", "support@prod", "support", "tiny:support"])
async def test_a_revision_that_a_route_leads_to_is_retired_by_force_alone(
    process: "Process", target: str
) -> None:
    acme = await acme_with_three(process)
    engine = Engine()
    retirement = Retirement(process.registry, process.snapshots, engine, engine)
    await process.routes.put(acme, "chat", to((target, 1), ("support@2", 0)), author="key:1")
    with pytest.raises(Conflict, match="'chat'"):
        await retirement.retire(acme, "support", 1, author="key:1")
    assert (label(process), engine.retired) == ("support@1", [])
    await retirement.retire(acme, "support", 2, author="key:1")
    await retirement.retire(acme, "support", 1, author="key:1", force=True)
    with pytest.raises(RevisionRetired, match="'chat' leads to"):
        label(process)
    assert len(engine.retired) == 2
    with pytest.raises(Conflict, match="no older version"):
        await process.routes.rollback(acme, "chat", author="key:1")


async def test_a_retirement_and_a_route_to_it_at_once_never_both_win(process: "Process") -> None:
    acme = await acme_with_three(process)
    retirement = Retirement(process.registry, process.snapshots, Engine(), Engine())
    outcomes = await asyncio.gather(
        *(
            call
            for i in range(4)
            for call in (
                process.routes.put(acme, f"chat-{i}", to(("support@3", 1)), author="key:1"),
                retirement.retire(acme, "support", 3, author="key:1"),
            )
        ),
        return_exceptions=True,
    )
    assert all(not isinstance(o, Exception) or isinstance(o, Conflict) for o in outcomes), outcomes
    led = [route.name for route in await process.routes.list(acme.id)]
    state = (await process.registry.revision(acme.id, "support", 3)).state
    assert (state == "ready") == bool(led)


@pytest.mark.parametrize("new_databases", ["postgresql"], indirect=True)  # SQLite: one writer
async def test_a_route_waits_for_the_retirement_that_looks_at_routes(process: "Process") -> None:
    """Between a retirement's look at the routes and its end no route can lead there, and a route
    that was planned before the retirement is looked at again after it."""
    acme = await acme_with_three(process)
    targets, puts = to(("support@3", 1)), list[asyncio.Task[RouteView]]()

    async def look(session: AsyncSession) -> None:
        puts.append(asyncio.create_task(process.routes.put(acme, "chat", targets, author="key:1")))
        while not puts[0].done() and not await _somebody_waits_for_a_lock(session):
            await asyncio.sleep(0)
        assert not puts[0].done()

    await process.registry.retire(acme.id, "support", 3, author="key:1", require=look)
    with pytest.raises(Conflict, match="retired"):
        await puts[0]
    assert await process.routes.list(acme.id) == ()


async def _somebody_waits_for_a_lock(session: AsyncSession) -> bool:
    return bool(await session.scalar(sql("SELECT count(*) FROM pg_locks WHERE NOT granted")))


async def test_a_storm_of_changes_keeps_a_true_history_and_one_order(process: "Process") -> None:
    acme = await acme_with_three(process)
    views = await asyncio.gather(
        *(
            process.routes.put(
                acme, "chat", to(("support@1", 1), ("support@2", weight)), author="key:1"
            )
            for weight in range(1, 13)
        )
    )
    history = await process.routes.versions(acme, "chat")
    assert [v.version for v in history] == list(range(12, 0, -1))
    assert sorted(views, key=lambda v: -v.version) == list(history)
    versions = [v.route_version for v in history]
    assert versions == sorted(set(versions), reverse=True)
    (entry,) = process.snapshots.current.routes.values()
    assert (entry.version, entry.targets) == (12, history[0].targets)


async def test_a_restarted_process_has_the_same_routes(process: "Process") -> None:
    acme = await acme_with_three(process)
    await process.routes.put(acme, "chat", to(("support@1", 3), ("tiny", 1)), author="key:1")
    await process.routes.put(acme, "gone", to(("tiny", 1)), author="key:1")
    await process.routes.delete(acme, "gone", author="key:1")
    await process.shares.create(acme, "team", author="key:1")
    live = LiveState()
    restarted = SnapshotService(
        process.database, process.blobs, Announcements(live, "two"), served=[BASE]
    )
    assert await restarted.refresh() == process.snapshots.current
    assert [key.name for key in restarted.current.routes] == ["chat"]
    await live.close()


async def test_a_route_s_gate_stands_before_what_is_new_to_it(process: "Process") -> None:
    acme = await acme_with_three(process)
    await process.routes.put(acme, "chat", to(("support@1", 1)), author="key:1")
    await process.gates.put(acme, [golden("support@2")], route="chat", author="key:1")
    with pytest.raises(GateFailed, match=r"support@2 does not pass .*contains 'yes'.*'no'"):
        await process.routes.put(
            acme, "chat", to(("support@1", 9), ("support@2", 1)), author="key:1"
        )
    assert label(process) == "support@1"
    await process.routes.put(acme, "chat", to(("support@1", 9), ("support@3", 1)), author="key:1")
    await process.routes.put(acme, "chat", to(("support@1", 5), ("support@3", 5)), author="key:1")
    asked = [candidate for candidate, _ in process.golden.asked]
    assert asked == ["support@2", "support@3"]
    runs = await process.gates.runs(acme, route="chat")
    assert [(r.candidate, r.passed, r.gate_version) for r in runs] == [
        ("support@3", True, 1),
        ("support@2", False, 1),
    ]


def golden(name: str) -> GoldenPrompt:
    return GoldenPrompt(name=name, prompt="Say yes", expect=Expectation(contains="yes"))


async def test_an_alias_that_a_gated_route_follows_passes_both_gates(process: "Process") -> None:
    acme = await acme_with_three(process)
    await process.routes.put(acme, "chat", to(("support", 1)), author="key:1")
    await process.gates.put(acme, [golden("support@2")], route="chat", author="key:1")
    await process.gates.put(acme, [golden("support@3")], adapter="support", author="key:1")
    for number in (2, 3):
        with pytest.raises(GateFailed):
            await process.promotion.move(acme, "support", "prod", number, author="key:1")
    assert label(process) == "support@1"
    view = await process.promotion.move(acme, "support", "canary", 2, author="key:1")
    assert view.number == 2


async def test_a_gate_that_changes_under_a_move_refuses_it(process: "Process") -> None:
    acme = await acme_with_three(process)
    passed = await process.gates.check_alias(
        acme, "support", "prod", 2, process.snapshots.current, author="key:1"
    )
    await process.gates.put(acme, [golden("x")], adapter="support", author="key:1")
    async with process.database.write() as session:
        with pytest.raises(Conflict, match="gate changed"):
            await process.gates.require(session, passed)


async def test_no_gate_stands_before_a_rollback(process: "Process") -> None:
    acme = await acme_with_three(process)
    for number in (1, 2):
        await process.routes.put(acme, "chat", to((f"support@{number}", 1)), author="key:1")
    await process.gates.put(acme, [golden("support@1")], route="chat", author="key:1")
    await process.routes.rollback(acme, "chat", author="key:1")
    assert label(process) == "support@1"


async def test_an_upload_whose_gate_fails_is_ready_but_not_promoted(process: "Process") -> None:
    acme = await acme_with_three(process)
    await process.gates.put(acme, [golden("support@4")], adapter="support", author="key:1")
    for text, number, serving in (("d", 4, 1), ("e", 5, 5)):
        await process.upload(acme, text, promote="prod")
        (job,) = await process.registry.claim_checks([BASE])
        verdict = await process.promotion.verdict(job)
        settled = await process.registry.settle(job.revision.id, PASSED, verdict)
        assert (settled.number, settled.state) == (number, "ready")
        assert (settled.not_promoted is None) == (number == serving)
        assert label(process, "support") == f"support@{serving}"
    view = await process.registry.revision(acme.id, "support", 4)
    assert view.not_promoted is not None and "'support@4'" in view.not_promoted
    refused = [
        e for e in await process.audit.entries(tenant_id=acme.id) if e.action == "alias.refused"
    ]
    assert [entry.target for entry in refused] == ["support@prod"]
