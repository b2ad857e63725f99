"""Summaries of the engines in Redis: written at every beat, read back, and rebuilt after its loss."""

import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from polyloom.platform.coordination import live_state, summaries
from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.coordination.summaries import SUMMARY_SECONDS
from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.engine.messages import CacheReport, HotPrefix
from polyloom.platform.services.engine_presence import EnginePresence
from polyloom.routing.placement.choice import EngineView


class Pool:
    """One engine, which has one chain cached, or is away."""

    def __init__(self) -> None:
        self.engines = (object(),)
        self.there = True
        self.views: Mapping[int, EngineView] = {}

    async def snapshots(self) -> dict[int, object]:
        if not self.there:
            raise EngineUnavailableError("away")
        status = SimpleNamespace(running=2, waiting=1, blocks_free=5, blocks_total=9)
        adapters = (SimpleNamespace(digest="sha256:a", state="resident"),)
        return {0: SimpleNamespace(status=status, adapters=adapters)}

    async def cache_reports(self) -> dict[int, CacheReport]:
        return {0: REPORT}

    def look_at(self, views: Mapping[int, EngineView]) -> None:
        self.views = views


REPORT = CacheReport(
    boot="boot",
    namespaces=(),
    hot=(HotPrefix("h", 32),),
    holds=(),
    checked_hits=0,
    cross_namespace_hits=0,
)


async def test_a_beat_shows_an_engine_to_every_server_until_it_expires(live: LiveState) -> None:
    now = 1_000.0
    pool, idle = Pool(), Pool()
    one = EnginePresence(pool, live, "one", clock=lambda: now)  # type: ignore[arg-type]
    other = EnginePresence(idle, live, "other", clock=lambda: now)  # type: ignore[arg-type]
    await one.beat()
    await other.beat()
    found = await other.summaries()
    assert sorted(found) == ["one/0", "other/0"]
    assert (found["one/0"].hot, found["one/0"].resident) == ({"h": 32}, ("sha256:a",))
    assert (pool.views[0].load, set(pool.views[0].hot)) == (3, {"h"})
    pool.there = False
    await one.beat()
    assert pool.views == {}
    now += SUMMARY_SECONDS + 1
    await other.beat()
    assert sorted(await other.summaries()) == ["other/0"]


async def test_a_lost_redis_costs_nothing_but_what_others_know(
    short_folder: Path, run_redis: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_state, "RETRY_SECONDS", 0.0)
    socket = short_folder / "presence.sock"
    pool = Pool()
    with run_redis(socket) as url:
        live = LiveState(url)
        presence = EnginePresence(pool, live, "one")  # type: ignore[arg-type]
        await presence.beat()
    await presence.beat()
    assert live.degraded and set(pool.views[0].hot) == {"h"}
    with run_redis(socket):
        await presence.beat()
        assert not live.degraded
        assert live.server is not None
        rebuilt = await summaries.read_all(live.server, time.time())
        assert sorted(rebuilt) == ["one/0"]
        await live.close()
