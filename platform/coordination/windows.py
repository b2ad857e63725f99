"""A sliding minute, kept as two counters: this minute's and the last one's.

Of the last minute the part that is still within the window counts, as if its use had been even.
Only `INCRBY` and `GET` in one transaction, so any number of processes may count at once: use is
added first and taken back when it turns out to be too much, never the other way round.
"""

import math
from dataclasses import dataclass

from redis.asyncio import Redis

WINDOW_SECONDS = 60


@dataclass(frozen=True)
class Usage:
    """Use of a window just after an addition.

    previous, current: counts of the last and of this minute.  elapsed: fraction of this minute
    that has passed.
    """

    previous: int
    current: int
    elapsed: float

    @property
    def total(self) -> float:
        """Use within the sliding minute."""
        return self.previous * (1.0 - self.elapsed) + self.current

    def seconds_until(self, amount: int, limit: int) -> float:
        """Seconds until `amount` more than this fits under `limit`; amount must be ≤ limit."""
        room = limit - amount
        if self.total <= room:
            return 0.0
        if self.current <= room:
            fraction = 1.0 - (room - self.current) / self.previous
        else:
            fraction = 2.0 - room / self.current
        return (fraction - self.elapsed) * WINDOW_SECONDS


async def add(redis: Redis, name: str, amount: int, now: float) -> Usage:
    """Count `amount` in the window `name` at unix time `now`."""
    minute = math.floor(now / WINDOW_SECONDS)
    current, previous = _key(name, minute), _key(name, minute - 1)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.incrby(current, amount)
        pipe.expire(current, 3 * WINDOW_SECONDS)
        pipe.get(previous)
        counted, _, before = await pipe.execute()
    return Usage(int(before or 0), int(counted), now / WINDOW_SECONDS - minute)


async def take_back(redis: Redis, name: str, amount: int, now: float) -> None:
    """Undo an `add` made at `now`."""
    await redis.decrby(_key(name, math.floor(now / WINDOW_SECONDS)), amount)


def _key(name: str, minute: int) -> str:
    return f"polyloom:window:{name}:{minute}"
