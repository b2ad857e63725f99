"""Tenants take turns at what they share."""

import asyncio

from polyloom.platform.turns import Turns


async def test_many_of_one_tenant_take_one_place() -> None:
    turns, shared, done = Turns(), asyncio.Lock(), list[str]()

    async def use(tenant: str) -> None:
        async with turns.of(tenant), shared:
            done.append(tenant)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for tenant in ("flood", "flood", "flood", "flood", "modest"):
            group.create_task(use(tenant))
    assert done.index("modest") == 1


def test_a_lock_lasts_as_long_as_it_is_used() -> None:
    turns = Turns()
    held = turns.of("a")
    assert turns.of("a") is held
    assert turns.of("b") is not held
