"""Two real engines behind one client: what goes where, and what the end of one means."""

import asyncio
import contextlib
import os
import random
import signal

import msgspec
import numpy as np
import pytest

from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.engine.fleet import EngineFleet
from polyloom.platform.engine.messages import Finished, Invalidate
from polyloom.platform.engine.pool import EnginePool
from polyloom.platform.engine.supervisor import EngineState
from polyloom.platform.services.engine_presence import EnginePresence
from polyloom.routing.request import CacheOwner, CacheScope

BLOCK = 16
OWNER = CacheOwner("tenant", "acme")


def scope(salt: str) -> CacheScope:
    return CacheScope(owner=OWNER, tokenizer_digest="sha256:tokenizer", salt=salt)


def words(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(3, 512, length))


async def finished(stream) -> Finished:
    async with contextlib.aclosing(stream) as events:
        async for event in events:
            if isinstance(event, Finished):
                return event
    raise AssertionError("no end")


async def until(condition, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.fixture
async def fleet(settings_factory, tmp_path_factory):
    folder = tmp_path_factory.mktemp("p")
    fleet = EngineFleet(
        [settings_factory(address=f"ipc://{folder}/{i}.sock", max_running=4) for i in range(2)]
    )
    fleet.clients = await fleet.start()
    yield fleet
    await fleet.close(drain_seconds=5)


async def test_two_engines_share_work_by_prefix(fleet, request_factory) -> None:
    pool = EnginePool(fleet.clients, block_size=BLOCK, kv_dtype="float32")
    await _prefixes_gather(pool, request_factory)
    await _a_second_process_finds_them(fleet, request_factory)
    await _conversations_stay(pool, request_factory)
    await _load_overrides_affinity(pool, request_factory)
    await _invalidation_reaches_both(pool)
    await _the_end_of_one_is_not_the_end(fleet, pool, request_factory)


def _trial(seed: int) -> list[tuple[int, ...]]:
    """Eight prefixes of 96 tokens, three requests each, shuffled."""
    prompts = [
        words(1000 * seed + group, 96) + words(2000 + 10 * group + turn, 20)
        for turn in range(3)
        for group in range(8)
    ]
    random.Random(seed).shuffle(prompts)
    return prompts


async def _prefixes_gather(pool, request_factory) -> None:
    """Of requests one after the other, all but each prefix's first hit; random choice hits less."""
    chance, hits = random.Random(5), {"affine": 0, "random": 0}
    for prompt in _trial(1):
        request = request_factory(prompt, cache=scope("affine"), max_tokens=1)
        hits["affine"] += (await finished(pool.generate(request))).cached_tokens >= 96
        request = request_factory(prompt, cache=scope("random"), max_tokens=1)
        engine = chance.choice(pool.engines)
        hits["random"] += (await finished(engine.generate(request))).cached_tokens >= 96
    assert hits["affine"] == 16
    assert hits["random"] <= 12
    busy = [report.namespaces[0].blocks > 0 for report in (await pool.cache_reports()).values()]
    assert busy == [True, True]


async def _a_second_process_finds_them(fleet, request_factory) -> None:
    """It has placed nothing itself: what it knows comes from the live state."""
    other, live = EnginePool(fleet.clients, block_size=BLOCK, kv_dtype="float32"), LiveState()
    presence = EnginePresence(other, live, "server")
    await presence.beat()
    summaries = await presence.summaries()
    assert sorted(summaries) == ["server/0", "server/1"]
    assert all(summary.hot for summary in summaries.values())
    for group in range(8):
        prompt = words(1000 + group, 96) + words(9000 + group, 20)
        request = request_factory(prompt, cache=scope("affine"), max_tokens=1)
        assert (await finished(other.generate(request))).cached_tokens >= 96
    await live.close()


async def _conversations_stay(pool, request_factory) -> None:
    homes = set()
    for turn in range(4):
        request = request_factory(words(turn, 40), max_tokens=30)
        request = msgspec.structs.replace(request, conversation="c")
        stream = pool.generate(request)
        await anext(stream)
        homes.add(next(i for i, e in enumerate(pool.engines) if e.runs(request.sequence_id)))
        await finished(stream)
    assert len(homes) == 1


async def _load_overrides_affinity(pool, request_factory) -> None:
    """Twenty long requests of one prefix at once do not all queue on its engine."""
    prefix = words(77, 64)
    requests = [
        request_factory(prefix + words(i, 8), cache=scope("load"), max_tokens=20) for i in range(20)
    ]

    async def run(request) -> None:
        await finished(pool.generate(request))

    tasks = [asyncio.create_task(run(request)) for request in requests]
    await until(lambda: sum(e.open_streams for e in pool.engines) == 20)
    loads = sorted(engine.open_streams for engine in pool.engines)
    await asyncio.gather(*tasks)
    assert 4 <= loads[0] < loads[1]


async def _invalidation_reaches_both(pool) -> None:
    await pool.invalidate(Invalidate(cause="operator", owner=OWNER))
    for report in (await pool.cache_reports()).values():
        assert [n.blocks for n in report.namespaces] == [0]
        assert report.namespaces[0].invalidations["operator"] > 0
        assert report.cross_namespace_hits == 0


async def _the_end_of_one_is_not_the_end(fleet, pool, request_factory) -> None:
    """Its requests are told; the other's go on; new ones find the other; then both serve again."""
    doomed, safe = (
        pool.engines[i].generate(request_factory(words(i, 20), max_tokens=900)) for i in range(2)
    )
    await asyncio.gather(anext(doomed), anext(safe))
    os.kill(fleet.supervisors[0].pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError):
        await finished(doomed)
    assert pool.healthy and pool.degraded
    assert fleet.state is EngineState.READY
    assert (await finished(pool.generate(request_factory(words(3, 20))))).reason == "length"
    assert (await finished(safe)).completion_tokens == 900
    assert (await pool.snapshot()).status.blocks_total > 0
    await until(lambda: not pool.degraded)
    assert len(await pool.cache_reports()) == 2
