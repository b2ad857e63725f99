"""The engine processes of one server: each with its own supervisor, memory and socket."""

import asyncio
from collections.abc import Sequence

from polyloom.platform.engine.client import EngineClient
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.supervisor import EngineState, EngineSupervisor


class EngineFleet:
    """Starts them together and ends them together; between the two each lives by itself."""

    def __init__(self, settings: Sequence[EngineSettings]) -> None:
        self.supervisors = tuple(EngineSupervisor(one) for one in settings)

    @property
    def state(self) -> EngineState:
        """READY if any serves; else what the first is doing."""
        states = [supervisor.state for supervisor in self.supervisors]
        return EngineState.READY if EngineState.READY in states else states[0]

    async def start(self) -> tuple[EngineClient, ...]:
        """One client each. Raises EngineStartError if one cannot start; nothing is left then."""
        starts = [asyncio.create_task(s.start()) for s in self.supervisors]
        try:
            return tuple(await asyncio.gather(*starts))
        except BaseException:  # one that failed has ended its own process
            for start in starts:
                start.cancel()
            ends = await asyncio.gather(*starts, return_exceptions=True)
            for supervisor, end in zip(self.supervisors, ends, strict=True):
                if not isinstance(end, BaseException):
                    await supervisor.close(drain_seconds=0)
            raise

    async def close(self, drain_seconds: float = 30.0) -> None:
        """Let running sequences finish for `drain_seconds`, then end the processes for good."""
        await asyncio.gather(*(s.close(drain_seconds) for s in self.supervisors))
