"""The record of prefix caches: what several processes report of one engine is counted once."""

import random
from dataclasses import dataclass, field

import msgspec
import pytest
from sqlalchemy import func, select

from polyloom.platform.db.engine import Database
from polyloom.platform.db.prefix_models import PrefixBootRow, PrefixCounterRow, PrefixNamespaceRow
from polyloom.platform.engine.messages import CacheReport, NamespaceCounters
from polyloom.platform.services.prefix_records import FOLD_AFTER, PrefixRecords, identity_of
from polyloom.routing.request import CacheOwner

ACME = CacheOwner("tenant", "acme")
OTHER = CacheOwner("group", "acme")


def counters(
    owner: CacheOwner = ACME, adapter: str | None = None, **values: object
) -> NamespaceCounters:
    zero: dict[str, object] = dict.fromkeys(
        ("eligible", "hits", "tokens_reused", "bytes_reused", "evictions", "blocks", "held_blocks"),
        0,
    )
    zero |= {"saved": 0.0, "invalidations": {}, "misses": {}}
    return NamespaceCounters(
        owner=owner,
        base_digest="sha256:base",
        adapter_digest=adapter,
        **(zero | values),  # type: ignore[arg-type]
    )


def report(boot: str, *namespaces: NamespaceCounters) -> CacheReport:
    return CacheReport(
        boot=boot,
        namespaces=namespaces,
        hot=(),
        holds=(),
        checked_hits=0,
        cross_namespace_hits=0,
    )


@dataclass
class Clock:
    now: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Engine:
    """A boot whose counters grow."""

    boot: str
    seen: dict[tuple[CacheOwner, str | None], NamespaceCounters] = field(default_factory=dict)

    def serve(self, owner: CacheOwner, adapter: str | None, hit: bool) -> None:
        old = self.seen.get((owner, adapter), counters(owner, adapter))
        misses = dict(old.misses)
        if not hit:
            misses["first"] = misses.get("first", 0) + 1
        self.seen[(owner, adapter)] = msgspec.structs.replace(
            old,
            eligible=old.eligible + 1,
            hits=old.hits + hit,
            tokens_reused=old.tokens_reused + 16 * hit,
            saved=old.saved + 0.5 * hit,
            misses=misses,
        )

    def report(self) -> CacheReport:
        return report(self.boot, *self.seen.values())


async def test_one_report_counts_once_however_often_and_by_whom(database: Database) -> None:
    one, other = PrefixRecords(database), PrefixRecords(database)
    early = report("boot-1", counters(eligible=3, hits=1, misses={"first": 2}))
    late = report("boot-1", counters(eligible=5, hits=2, misses={"first": 2, "salt": 1}))
    await one.absorb([early])
    await other.absorb([late])
    await PrefixRecords(database).absorb([early])  # held up on its way
    await one.absorb([late])
    (total,) = await one.totals(ACME)
    assert (total.eligible, total.hits) == (5, 2)
    assert total.misses == {"first": 2, "salt": 1}


async def test_a_new_process_of_the_engine_adds_to_the_old_one(database: Database) -> None:
    records = PrefixRecords(database)
    await records.absorb([report("boot-1", counters(eligible=3, invalidations={"operator": 7}))])
    await records.absorb([report("boot-2", counters(eligible=1, invalidations={"operator": 1}))])
    (total,) = await records.totals()
    assert total.eligible == 4
    assert total.invalidations == {"operator": 8}


async def test_owners_and_revisions_do_not_mix(database: Database) -> None:
    records = PrefixRecords(database)
    namespaces = [counters(eligible=1), counters(adapter="sha256:a", eligible=2)]
    await records.absorb([report("boot-1", *namespaces, counters(OTHER, eligible=4))])
    assert [n.eligible for n in await records.totals(ACME)] == [1, 2]
    assert [n.eligible for n in await records.totals(OTHER)] == [4]
    assert len(await records.totals()) == 3


async def test_silent_boots_become_one_row_and_come_too_late(database: Database) -> None:
    clock = Clock()
    records = PrefixRecords(database, clock=clock)
    for number in range(5):
        await records.absorb([report(f"boot-{number}", counters(eligible=1, misses={"first": 1}))])
    clock.now += FOLD_AFTER.total_seconds() + 1
    await records.keep(["boot-4"])
    async with database.read() as session:
        assert await session.scalar(select(func.count()).select_from(PrefixCounterRow)) == 2
        assert await session.scalar(select(func.count()).select_from(PrefixNamespaceRow)) == 1
    await PrefixRecords(database, clock=clock).absorb([report("boot-0", counters(eligible=1))])
    await PrefixRecords(database, clock=clock).absorb([report("boot-4", counters(eligible=2))])
    (total,) = await records.totals()
    assert (total.eligible, total.misses) == (6, {"first": 5})


@pytest.mark.parametrize("seed", range(3))
async def test_random_lives_add_up(database: Database, seed: int) -> None:
    """Engines start, serve and end; three processes report them in any order, one gets older
    reports than the others; the sums are what the engines did."""
    chance, clock = random.Random(seed), Clock()
    processes = [PrefixRecords(database, clock=clock) for _ in range(3)]
    engines, ended = [Engine("boot-0"), Engine("boot-1")], list[Engine]()
    late = [engine.report() for engine in engines]
    for step in range(60):
        engine = chance.choice(engines)
        adapter = chance.choice([None, "sha256:a", "sha256:b"])
        engine.serve(chance.choice([ACME, OTHER]), adapter, chance.random() < 0.5)
        if step % 7 == 0:
            await chance.choice(processes).absorb([e.report() for e in engines])
        if step % 11 == 0:
            await processes[2].absorb(late)
            late = [e.report() for e in engines]
        if step % 20 == 19:
            await processes[0].absorb([e.report() for e in engines])
            ended.append(engines.pop(0))
            engines.append(Engine(f"boot-{step}"))
            clock.now += FOLD_AFTER.total_seconds() / 2
            await processes[1].keep(e.boot for e in engines)
    await processes[1].absorb([e.report() for e in engines])
    found = {identity_of(n): (n.eligible, n.hits, n.misses) for n in await processes[0].totals()}
    truth = dict[object, tuple[int, int, dict[str, int]]]()
    for engine in [*ended, *engines]:
        for n in engine.seen.values():
            before = truth.get(identity_of(n), (0, 0, {"first": 0}))
            misses = {"first": before[2]["first"] + n.misses.get("first", 0)}
            truth[identity_of(n)] = (before[0] + n.eligible, before[1] + n.hits, misses)
    assert {k: (e, h, {"first": m.get("first", 0)}) for k, (e, h, m) in found.items()} == truth
    async with database.read() as session:
        boots = await session.scalar(select(func.count()).select_from(PrefixBootRow))
    assert boots is not None and boots <= 5
