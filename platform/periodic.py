"""Work that repeats in the background for as long as the server runs."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from polyloom.platform.cancelling import being_cancelled

log = logging.getLogger(__name__)


class Periodic:
    """Calls `action` every `interval` seconds. A failure is logged and the next call comes."""

    def __init__(self, action: Callable[[], Awaitable[object]], interval: float) -> None:
        self._action = action
        self._interval = interval
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """The first call comes after one interval."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Cancel the call under way, and the rest."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        while not being_cancelled():
            await asyncio.sleep(self._interval)
            try:
                await self._action()
            except Exception:
                log.exception("%s failed, next try in %g s", self._name, self._interval)

    @property
    def _name(self) -> str:
        return getattr(self._action, "__qualname__", repr(self._action))
