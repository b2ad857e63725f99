"""Tells all processes what this server's engines hold, and this server's pool what is known."""

from collections.abc import Mapping

from polyloom.platform.clock import Clock, system_clock
from polyloom.platform.coordination import summaries
from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.coordination.summaries import EngineSummary
from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.engine.messages import CacheReport, Snapshot
from polyloom.platform.engine.pool import EnginePool
from polyloom.platform.periodic import Periodic
from polyloom.routing.placement.choice import EngineView

BEAT_SECONDS = 1.0


class EnginePresence:
    """A beat: ask the engines, write summaries to the live state, read them back, place by them."""

    def __init__(
        self, pool: EnginePool, live: LiveState, server: str, *, clock: Clock = system_clock
    ) -> None:
        """server: unique to this process."""
        self._pool = pool
        self._live = live
        self._names = {i: f"{server}/{i}" for i in range(len(pool.engines))}
        self._clock = clock
        self._reports: dict[int, CacheReport] = {}
        self._beats = Periodic(self.beat, BEAT_SECONDS)

    @property
    def reports(self) -> Mapping[int, CacheReport]:
        """By engine, as of the last beat; an engine that did not answer has none."""
        return self._reports

    def start(self) -> None:
        """Beat every second."""
        self._beats.start()

    async def stop(self) -> None:
        """Stop beating; the summaries expire."""
        await self._beats.stop()

    async def beat(self) -> None:
        """Once. Without engines nothing is written, and what was written expires."""
        try:
            snapshots = await self._pool.snapshots()
            self._reports = await self._pool.cache_reports()
        except EngineUnavailableError:
            self._reports = {}
            self._pool.look_at({})
            return
        await self._publish(snapshots)
        known = await self.summaries()
        self._pool.look_at(
            {i: _view(known[name]) for i, name in self._names.items() if name in known}
        )

    async def summaries(self) -> dict[str, EngineSummary]:
        """Of every engine of every server, from the live state."""
        now = self._clock()
        return await self._live.run(lambda redis: summaries.read_all(redis, now))

    async def _publish(self, snapshots: Mapping[int, Snapshot]) -> None:
        found = tuple(
            _summary(self._names[index], snapshots[index], report)
            for index, report in self._reports.items()
            if index in snapshots
        )
        now = self._clock()
        await self._live.run(lambda redis: summaries.publish(redis, found, now))


def _summary(name: str, snapshot: Snapshot, report: CacheReport) -> EngineSummary:
    status = snapshot.status
    return EngineSummary(
        engine=name,
        boot=report.boot,
        running=status.running,
        waiting=status.waiting,
        blocks_free=status.blocks_free,
        blocks_total=status.blocks_total,
        hot={prefix.block_hash: prefix.num_tokens for prefix in report.hot},
        resident=tuple(a.digest for a in snapshot.adapters if a.state == "resident"),
    )


def _view(summary: EngineSummary) -> EngineView:
    return EngineView(
        load=summary.running + summary.waiting,
        hot=summary.hot.keys(),
        resident=frozenset(summary.resident),
    )
