"""The shared live state: a Redis server, or one inside this process.

Everything in it can be rebuilt or done without. When the server is lost, operations run on the
embedded one instead: limits are then counted per process, and the loss is counted and logged.
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fakeredis import FakeAsyncRedis, FakeServer
from redis.asyncio import Redis
from redis.exceptions import RedisError

log = logging.getLogger(__name__)

Result = TypeVar("Result")

COMMAND_SECONDS = 0.5
RETRY_SECONDS = 1.0
LOST = (RedisError, OSError, TimeoutError)


class LiveState:
    """Where live state is kept, and what to do when it is away."""

    def __init__(
        self, url: str | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """url: `redis://…` or `unix://…`; None keeps everything in this process."""
        self._clock = clock
        self.embedded: Redis = FakeAsyncRedis(server=FakeServer(server_type="redis"))
        self.server: Redis | None = None
        if url is not None:
            self.server = Redis.from_url(
                url, socket_timeout=COMMAND_SECONDS, socket_connect_timeout=COMMAND_SECONDS
            )
        self._retry_at: float | None = None
        self._outages = 0

    @property
    def degraded(self) -> bool:
        """The Redis server is away."""
        return self._retry_at is not None

    @property
    def outages(self) -> int:
        """How often the Redis server was lost since the start."""
        return self._outages

    async def run(self, operation: Callable[[Redis], Awaitable[Result]]) -> Result:
        """`operation` on the server, or on the embedded one while the server is away."""
        if self.server is None or (self._retry_at is not None and self._clock() < self._retry_at):
            return await operation(self.embedded)
        try:
            result = await operation(self.server)
        except LOST as error:
            self.lost(error)
            return await operation(self.embedded)
        self.found()
        return result

    def lost(self, error: BaseException) -> None:
        """The server did not answer: leave it alone for `RETRY_SECONDS`."""
        if self._retry_at is None:
            self._outages += 1
            log.warning("Redis is away, limits are counted per process: %s", error)
        self._retry_at = self._clock() + RETRY_SECONDS

    def found(self) -> None:
        """The server answered."""
        if self._retry_at is not None:
            self._retry_at = None
            log.warning("Redis is back")

    async def close(self) -> None:
        """Close all connections."""
        await self.embedded.aclose()
        if self.server is not None:
            await self.server.aclose()
