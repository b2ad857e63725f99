"""Concurrent requests of a tenant, as leases that expire unless their process renews them.

A sorted set per tenant: member is the lease, score the unix time at which it expires. A process
that dies gives its leases back by silence.
"""

from redis.asyncio import Redis

LEASE_SECONDS = 30.0


async def take(redis: Redis, tenant: str, lease: str, limit: int, now: float) -> bool:
    """Whether `lease` was taken within `limit`. Racing processes may all be refused at the last
    free place, but never more than `limit` are let in."""
    key = _key(tenant)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.zremrangebyscore(key, "-inf", now)
        pipe.zadd(key, {lease: now + LEASE_SECONDS})
        pipe.expire(key, int(2 * LEASE_SECONDS))
        pipe.zcard(key)
        *_, held = await pipe.execute()
    if int(held) <= limit:
        return True
    await give_back(redis, tenant, lease)
    return False


async def renew(redis: Redis, tenant: str, held: list[str], now: float) -> None:
    """Keep the leases in `held` for another `LEASE_SECONDS`."""
    key = _key(tenant)
    async with redis.pipeline(transaction=True) as pipe:
        pipe.zadd(key, dict.fromkeys(held, now + LEASE_SECONDS))
        pipe.expire(key, int(2 * LEASE_SECONDS))
        await pipe.execute()


async def give_back(redis: Redis, tenant: str, lease: str) -> None:
    """End a lease; giving back twice does no harm."""
    await redis.zrem(_key(tenant), lease)


def _key(tenant: str) -> str:
    return f"polyloom:leases:{tenant}"
