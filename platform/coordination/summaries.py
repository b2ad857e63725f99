"""What each engine holds now, where every process can read it: hot prefixes, residency, load.

One value an engine that expires unless its process renews it, and an index of them by expiry. All of
it is rebuilt from the engines at every beat; without it requests are placed by load alone.
"""

from contextlib import suppress
from typing import cast

import msgspec
from redis.asyncio import Redis

SUMMARY_SECONDS = 15.0
_INDEX = "polyloom:engines"


class EngineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One engine.

    engine: its name, unique over all servers.  boot: id of its process.  hot: tokens up to the end
    of each cached chain, by block hash.  resident: digests of adapters on the device.
    """

    engine: str
    boot: str
    running: int
    waiting: int
    blocks_free: int
    blocks_total: int
    hot: dict[str, int]
    resident: tuple[str, ...]


_decoder = msgspec.msgpack.Decoder(EngineSummary)


async def publish(redis: Redis, summaries: tuple[EngineSummary, ...], now: float) -> None:
    """Write summaries, each for the next `SUMMARY_SECONDS`. now: unix seconds."""
    async with redis.pipeline(transaction=True) as pipe:
        for summary in summaries:
            data = msgspec.msgpack.encode(summary)
            pipe.set(_key(summary.engine), data, px=int(SUMMARY_SECONDS * 1000))
            pipe.zadd(_INDEX, {summary.engine: now + SUMMARY_SECONDS})
        pipe.zremrangebyscore(_INDEX, "-inf", now)
        pipe.expire(_INDEX, int(2 * SUMMARY_SECONDS))
        await pipe.execute()


async def read_all(redis: Redis, now: float) -> dict[str, EngineSummary]:
    """The summaries that have not expired, by engine; those of another version are left out."""
    members = cast(list[bytes], await redis.zrangebyscore(_INDEX, now, "+inf"))
    names = [name.decode() for name in members]
    if not names:
        return {}
    values = cast(list[bytes | None], await redis.mget([_key(name) for name in names]))
    found = {}
    for name, data in zip(names, values, strict=True):
        if data is not None:
            with suppress(msgspec.DecodeError):
                found[name] = _decoder.decode(data)
    return found


def _key(engine: str) -> str:
    return f"polyloom:engine:{engine}"
