"""A tenant's limits at the door: requests and tokens a minute, requests at once.

Prompt tokens count when the request enters, completion tokens when it ends: a request that was let
in is never cut short, and the tokens it wrote weigh on the next ones. A request that the token
limit refuses still counts as a request.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from polyloom.platform.clock import Clock, system_clock
from polyloom.platform.coordination import leases, windows
from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.errors import QuotaExceeded, RateLimited
from polyloom.platform.periodic import Periodic
from polyloom.platform.services.views import TenantView

BUSY_RETRY_SECONDS = 1.0


class Admission:
    """One request that was let in."""

    def __init__(self, limits: "RateLimits", tenant: TenantView) -> None:
        self._limits = limits
        self._tenant = tenant

    async def charge(self, completion_tokens: int) -> None:
        """Count the tokens that the request wrote. Never refused."""
        if self._tenant.limits.tokens_per_minute is not None:
            await self._limits.count_tokens(self._tenant, completion_tokens)


class RateLimits:
    """Counts and refuses, for all processes that share the live state."""

    def __init__(self, live: LiveState, *, clock: Clock = system_clock) -> None:
        self._live = live
        self._clock = clock
        self._held: dict[str, set[str]] = {}
        self._renewer = Periodic(self.renew_held, leases.LEASE_SECONDS / 3)

    async def start(self) -> None:
        """Keep the leases of running requests alive."""
        self._renewer.start()

    async def stop(self) -> None:
        """Stop renewing."""
        await self._renewer.stop()

    @asynccontextmanager
    async def admit(self, tenant: TenantView, *, prompt_tokens: int) -> AsyncGenerator[Admission]:
        """Let one request in, or raise RateLimited with `retry_after` (QuotaExceeded where waiting
        cannot help). The request counts as running until the block ends."""
        limits = tenant.limits
        slots, requests, tokens = (
            limits.concurrent_requests,
            limits.requests_per_minute,
            limits.tokens_per_minute,
        )
        lease = None if slots is None else await self._take_lease(tenant.slug, slots)
        try:
            if requests is not None:
                await self._count(f"requests:{tenant.slug}", 1, requests, "requests")
            if tokens is not None:
                await self._count(f"tokens:{tenant.slug}", prompt_tokens, tokens, "tokens")
            yield Admission(self, tenant)
        finally:
            if lease is not None:
                await asyncio.shield(self._give_lease_back(tenant.slug, lease))

    async def count_tokens(self, tenant: TenantView, tokens: int) -> None:
        """Add to the tenant's tokens of this minute, whatever the limit."""
        name, now = f"tokens:{tenant.slug}", self._clock()
        await self._live.run(lambda redis: windows.add(redis, name, tokens, now))

    async def _count(self, name: str, amount: int, limit: int, what: str) -> None:
        if amount > limit:
            raise QuotaExceeded(f"the request's {amount} {what} are over the limit of {limit}")
        now = self._clock()
        used = await self._live.run(lambda redis: windows.add(redis, name, amount, now))
        if used.total <= limit:
            return
        await self._live.run(lambda redis: windows.take_back(redis, name, amount, now))
        before = windows.Usage(used.previous, used.current - amount, used.elapsed)
        raise RateLimited(
            f"over the tenant's limit of {limit} {what} per minute",
            retry_after=before.seconds_until(amount, limit),
        )

    async def _take_lease(self, tenant: str, limit: int) -> str:
        lease, now = uuid.uuid4().hex, self._clock()
        taken = await self._live.run(lambda redis: leases.take(redis, tenant, lease, limit, now))
        if not taken:
            raise RateLimited(
                f"over the tenant's limit of {limit} concurrent requests",
                retry_after=BUSY_RETRY_SECONDS,
            )
        self._held.setdefault(tenant, set()).add(lease)
        return lease

    async def _give_lease_back(self, tenant: str, lease: str) -> None:
        held = self._held[tenant]
        held.discard(lease)
        if not held:
            del self._held[tenant]
        await self._live.run(lambda redis: leases.give_back(redis, tenant, lease))

    async def renew_held(self) -> None:
        """Renew every lease of this process once."""
        for tenant, held in list(self._held.items()):
            names, now = list(held), self._clock()
            await self._live.run(partial(leases.renew, tenant=tenant, held=names, now=now))
