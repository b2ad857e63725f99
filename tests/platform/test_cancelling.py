"""Tasks end when they are told to, whatever a library makes of a cancellation."""

import asyncio

import pytest

from polyloom.platform.db.engine import Database
from polyloom.platform.periodic import Periodic


async def test_a_timeout_that_a_cancellation_became_is_still_one() -> None:
    database, begun = Database("sqlite://"), asyncio.Event()

    async def read() -> None:
        async with database.read():
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                raise TimeoutError from error

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await database.close()


async def test_periodic_work_that_loses_its_cancellation_ends_all_the_same() -> None:
    begun = asyncio.Event()

    async def action() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as error:
            raise OSError("the connection is broken") from error

    work = Periodic(action, 0.001)
    work.start()
    await begun.wait()
    async with asyncio.timeout(5):
        await work.stop()
