"""Limits: exact at the door, shared by all processes, and never an error when Redis is away."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyloom.platform.coordination.leases import LEASE_SECONDS
from polyloom.platform.coordination.limits import RateLimits
from polyloom.platform.coordination.live_state import RETRY_SECONDS, LiveState
from polyloom.platform.coordination.windows import Usage
from polyloom.platform.errors import QuotaExceeded, RateLimited
from polyloom.platform.services.views import TenantLimits, TenantView

if TYPE_CHECKING:
    from conftest import Time


def tenant(**limits: int) -> TenantView:
    return TenantView(
        id=1,
        slug="acme",
        state="active",
        limits=TenantLimits(**limits),
        created_at=datetime.now(UTC),
    )


async def enter(limits: RateLimits, who: TenantView, prompt_tokens: int = 1) -> None:
    async with limits.admit(who, prompt_tokens=prompt_tokens):
        pass


async def refused(limits: RateLimits, who: TenantView, prompt_tokens: int = 1) -> RateLimited:
    with pytest.raises(RateLimited) as caught:
        await enter(limits, who, prompt_tokens)
    assert caught.value.retry_after is not None
    return caught.value


async def test_requests_of_a_minute(live: LiveState, clock: "Time") -> None:
    limits, acme = RateLimits(live, clock=clock), tenant(requests_per_minute=3)
    for _ in range(3):
        await enter(limits, acme)
    error = await refused(limits, acme)
    # 45 s to the next minute, then a third of it until one of the three is forgotten
    assert error.retry_after == pytest.approx(45 + 20)
    clock.now += error.retry_after - 0.1
    await refused(limits, acme)
    clock.now += 0.2
    await enter(limits, acme)


async def test_a_refused_request_does_not_count(live: LiveState, clock: "Time") -> None:
    limits, acme = RateLimits(live, clock=clock), tenant(requests_per_minute=4)
    for _ in range(4):
        await enter(limits, acme)
    for _ in range(50):
        error = await refused(limits, acme)
    assert error.retry_after == pytest.approx(60)
    clock.now += 60
    await enter(limits, acme)


async def test_tokens_are_counted_at_both_ends(live: LiveState, clock: "Time") -> None:
    limits, acme = RateLimits(live, clock=clock), tenant(tokens_per_minute=100)
    async with limits.admit(acme, prompt_tokens=40) as admission:
        await admission.charge(50)
    await enter(limits, acme, 10)
    error = await refused(limits, acme, 1)
    assert "100 tokens per minute" in error.message
    with pytest.raises(QuotaExceeded, match="101 tokens"):
        await enter(limits, acme, 101)


async def test_tenants_do_not_share_windows(live: LiveState, clock: "Time") -> None:
    limits, acme = RateLimits(live, clock=clock), tenant(requests_per_minute=1)
    await enter(limits, acme)
    other = TenantView(
        id=2, slug="acme2", state="active", limits=acme.limits, created_at=acme.created_at
    )
    await enter(limits, other)


async def test_processes_share_one_limit(new_live: Callable[[], LiveState], clock: "Time") -> None:
    processes = [RateLimits(new_live(), clock=clock) for _ in range(4)]
    acme = tenant(requests_per_minute=10)
    results = await asyncio.gather(
        *(enter(processes[i % 4], acme) for i in range(40)), return_exceptions=True
    )
    admitted = sum(result is None for result in results)
    assert all(result is None or isinstance(result, RateLimited) for result in results)
    # racing requests may refuse each other at the last places, but none is let in too many
    assert 1 <= admitted <= 10
    for i in range(10 - admitted):
        await enter(processes[i % 4], acme)
    for limits in processes:
        await refused(limits, acme)


async def test_concurrent_requests(live: LiveState, clock: "Time") -> None:
    limits, acme = RateLimits(live, clock=clock), tenant(concurrent_requests=2)
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(limits.admit(acme, prompt_tokens=1))
        await refused(limits, acme)
    async with limits.admit(acme, prompt_tokens=1), limits.admit(acme, prompt_tokens=1):
        await refused(limits, acme)


async def test_a_place_is_free_again_after_an_error_or_a_cancellation(
    live: LiveState, clock: "Time"
) -> None:
    limits, acme = RateLimits(live, clock=clock), tenant(concurrent_requests=1)
    with pytest.raises(KeyError):
        async with limits.admit(acme, prompt_tokens=1):
            raise KeyError
    entered = asyncio.Event()

    async def held() -> None:
        async with limits.admit(acme, prompt_tokens=1):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(held())
    await entered.wait()
    await refused(limits, acme)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await enter(limits, acme)


async def test_a_dead_process_gives_its_places_back(
    new_live: Callable[[], LiveState], clock: "Time"
) -> None:
    dead, alive = (RateLimits(new_live(), clock=clock) for _ in range(2))
    acme = tenant(concurrent_requests=1)
    async with dead.admit(acme, prompt_tokens=1):
        clock.now += LEASE_SECONDS - 1
        await dead.renew_held()
        clock.now += LEASE_SECONDS - 1
        await refused(alive, acme)
        clock.now += 2
        await enter(alive, acme)


async def test_unlimited_tenants_touch_no_redis(clock: "Time") -> None:
    live = LiveState("unix:///nowhere.sock")
    await enter(RateLimits(live, clock=clock), tenant())
    assert not live.degraded
    await live.close()


async def test_without_redis_limits_hold_in_each_process(
    short_folder: Path, clock: "Time", run_redis: Callable[..., object]
) -> None:
    socket = short_folder / "mortal.sock"
    acme = tenant(requests_per_minute=2, concurrent_requests=5)
    with run_redis(socket) as url:
        live = LiveState(url, clock=clock)
        limits = RateLimits(live, clock=clock)
        await enter(limits, acme)
        assert not live.degraded
    for _ in range(2):
        await enter(limits, acme)
    await refused(limits, acme)
    assert live.degraded and live.outages == 1
    with run_redis(socket):
        clock.now += RETRY_SECONDS
        await enter(limits, acme)
        assert not live.degraded
    await live.close()


@given(
    limit=st.integers(1, 1_000),
    previous=st.integers(0, 1_000),
    current=st.integers(0, 1_000),
    elapsed=st.floats(0, 1, exclude_max=True),
    data=st.data(),
)
def test_the_wait_is_long_enough_and_no_longer(
    limit: int, previous: int, current: int, elapsed: float, data: st.DataObject
) -> None:
    amount = data.draw(st.integers(1, limit))
    usage = Usage(previous, current, elapsed)

    def fits(seconds: float) -> bool:
        fraction = elapsed + seconds / 60
        if fraction < 1:
            later = Usage(previous, current, fraction)
        else:
            later = Usage(current, 0, min(fraction - 1, 1.0))
        return later.total + amount <= limit + 1e-6

    wait = usage.seconds_until(amount, limit)
    assert 0 <= wait <= 120
    assert fits(wait)
    if wait > 1:
        assert not fits(wait - 1)
