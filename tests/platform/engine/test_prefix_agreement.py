"""After any run, the SQL record, the summaries in Redis and the engines' block index say the same."""

import random
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np

from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.db.engine import Database
from polyloom.platform.engine.messages import CacheReport, Invalidate, Snapshot
from polyloom.platform.engine.prefix import prompt_chain
from polyloom.platform.engine.step import Engine
from polyloom.platform.services.engine_presence import EnginePresence
from polyloom.platform.services.prefix_records import PrefixRecords
from polyloom.routing.placement.choice import EngineView
from polyloom.routing.request import CacheOwner, CacheScope, GenerationRequest

BLOCK = 16
OWNERS = [CacheOwner("tenant", "a"), CacheOwner("tenant", "b"), CacheOwner("group", "a")]
Key = tuple[CacheOwner, str | None]


class EnginesHere:
    """What is asked of a pool, of engines in this process."""

    def __init__(self, engines: list[Engine]) -> None:
        self.engines = engines
        self.views: Mapping[int, EngineView] = {}

    async def snapshots(self) -> dict[int, Snapshot]:
        return {i: engine.snapshot() for i, engine in enumerate(self.engines)}

    async def cache_reports(self) -> dict[int, CacheReport]:
        return {i: engine.cache_report() for i, engine in enumerate(self.engines)}

    def look_at(self, views: Mapping[int, EngineView]) -> None:
        self.views = views


class Truth:
    """Counted from what each request was told, and the hashes that may be cached in each engine."""

    def __init__(self, engines: int) -> None:
        self.counts: dict[Key, Counter[str]] = {}
        self.cached: list[dict[Key, set[str]]] = [{} for _ in range(engines)]

    def ended(self, engine: int, request: GenerationRequest, outcome) -> None:
        key = (request.cache.owner, request.combination.adapter_digest)
        counts = self.counts.setdefault(key, Counter())
        counts["eligible"] += outcome.eligible > 0
        counts["hits"] += outcome.cached >= BLOCK
        counts["tokens_reused"] += outcome.cached
        counts["bytes_reused"] += outcome.bytes
        if outcome.miss is not None:
            counts[outcome.miss.reason] += 1
        chain = prompt_chain(request, "float32", BLOCK)
        self.cached[engine].setdefault(key, set()).update(chain)

    def invalidated(self, owner: CacheOwner | None, adapter: str | None) -> None:
        for namespaces in self.cached:
            for key, hashes in namespaces.items():
                if owner in (None, key[0]) and adapter in (None, key[1]):
                    hashes.clear()

    def restarted(self, engine: int) -> None:
        self.cached[engine] = {}


def words(chance: random.Random) -> tuple[int, ...]:
    """One of six prefixes of three blocks, and a tail."""
    prefix = np.random.default_rng(chance.randrange(6)).integers(3, 512, 3 * BLOCK)
    tail = np.random.default_rng(chance.randrange(10**6)).integers(3, 512, chance.randrange(30))
    cut = chance.choice([5, 20, 48])
    return tuple(int(t) for t in [*prefix[:cut], *tail])


async def test_record_live_state_and_index_agree(
    engine_factory: Callable[..., Engine],
    request_factory: Callable[..., GenerationRequest],
    run: Callable,
    adapter_factory: Callable,
    database: Database,
    live: LiveState,
) -> None:
    chance, records = random.Random(7), PrefixRecords(database)
    adapters = [None, adapter_factory(8, 1), adapter_factory(4, 2)]
    pool, truth = EnginesHere([engine_factory(), engine_factory()]), Truth(2)
    presence = EnginePresence(pool, live, "server")  # type: ignore[arg-type]
    for number in range(30):
        engine = chance.randrange(2)
        requests = [
            request_factory(
                words(chance),
                adapter=chance.choice(adapters),
                cache=CacheScope(
                    owner=chance.choice(OWNERS),
                    tokenizer_digest="sha256:t",
                    salt=chance.choice([None, "a", "b"]),
                ),
                max_tokens=1,
            )
            for _ in range(chance.randint(1, 4))
        ]
        for request, answer in zip(requests, run(pool.engines[engine], requests), strict=True):
            truth.ended(engine, request, answer.end.cache)
        if number % 8 == 7:
            owner = chance.choice([None, *OWNERS])
            adapter = chance.choice(adapters)
            digest = None if adapter is None else adapter.digest
            for each in pool.engines:
                each.invalidate(Invalidate(cause="operator", owner=owner, adapter_digest=digest))
            truth.invalidated(owner, digest)
        if number % 5 == 0:
            await records.absorb(list((await pool.cache_reports()).values()))
        if number == 20:
            await records.absorb([pool.engines[0].cache_report()])
            pool.engines[0] = engine_factory()
            truth.restarted(0)
    await presence.beat()
    reports = await pool.cache_reports()
    await records.absorb(list(reports.values()))
    await _record_is_the_truth(records, truth)
    await _live_state_is_the_index(presence, pool, reports, truth)


async def _record_is_the_truth(records: PrefixRecords, truth: Truth) -> None:
    found = {}
    for total in await records.totals():
        counts = Counter({name: count for name, count in total.misses.items() if count})
        for name in ("eligible", "hits", "tokens_reused", "bytes_reused"):
            counts[name] = getattr(total, name)
        found[(total.owner, total.adapter_digest)] = +counts
    assert found == {key: +counts for key, counts in truth.counts.items()}


async def _live_state_is_the_index(
    presence: EnginePresence, pool: EnginesHere, reports: Mapping[int, CacheReport], truth: Truth
) -> None:
    summaries = await presence.summaries()
    assert sum(report.checked_hits for report in reports.values()) > 0
    for index, report in reports.items():
        summary = summaries[f"server/{index}"]
        assert summary.boot == report.boot
        assert summary.hot == {hot.block_hash: hot.num_tokens for hot in report.hot}
        assert pool.views[index].hot == summary.hot.keys()
        may_be_cached = set().union(*truth.cached[index].values())
        assert summary.hot.keys() <= may_be_cached
        blocks = {(n.owner, n.adapter_digest): n.blocks for n in report.namespaces if n.blocks}
        assert blocks == {k: len(hashes) for k, hashes in truth.cached[index].items() if hashes}
        assert report.cross_namespace_hits == 0
        resident = {
            a.digest for a in pool.engines[index].snapshot().adapters if a.state == "resident"
        }
        assert set(summary.resident) == resident
