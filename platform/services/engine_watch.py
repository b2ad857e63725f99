"""Looks at the engine now and then, for what only it can know."""

from collections.abc import Mapping

from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.engine.messages import Capability, SpeculationReport
from polyloom.platform.engine.pool import EnginePool
from polyloom.platform.periodic import Periodic
from polyloom.platform.services.retirement import Retirement

WATCH_SECONDS = 2.0


class EngineWatch:
    """Keeps the engine's counters for the metrics, and takes revisions out of service whose stored
    files the engine found changed."""

    def __init__(self, engine: EnginePool, retirement: Retirement) -> None:
        self._engine = engine
        self._retirement = retirement
        self._handled: set[str] = set()
        self._capabilities: tuple[Capability, ...] = ()
        self._speculation: Mapping[int, SpeculationReport] = {}
        self._watcher = Periodic(self.look, WATCH_SECONDS)

    def capabilities(self) -> tuple[Capability, ...]:
        """As of the last look."""
        return self._capabilities

    def speculation(self) -> Mapping[int, SpeculationReport]:
        """By engine, as of the last look."""
        return self._speculation

    def start(self) -> None:
        """Look every few seconds."""
        self._watcher.start()

    async def stop(self) -> None:
        """Stop looking."""
        await self._watcher.stop()

    async def look(self) -> None:
        """Once. An engine that is away has nothing to say."""
        try:
            snapshot = await self._engine.snapshot()
            self._speculation = await self._engine.speculation_reports()
        except EngineUnavailableError:
            return
        self._capabilities = snapshot.capabilities
        quarantined = set(snapshot.status.quarantined)
        for digest in sorted(quarantined - self._handled):
            await self._retirement.quarantine(digest)
        self._handled = quarantined
