"""Announcements: every process hears each one once, and a lost Redis is survived."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from polyloom.platform.coordination.announcements import (
    CHANNEL,
    Announcements,
    CancelRequest,
    KeysChanged,
    RoutesChanged,
)
from polyloom.platform.coordination.live_state import LiveState


class Heard:
    """What one process heard, and a way to wait for it."""

    def __init__(self, announcements: Announcements) -> None:
        self.items: list[RoutesChanged] = []
        self._arrived = asyncio.Event()
        announcements.subscribe(RoutesChanged, self._hear)

    async def _hear(self, announcement: RoutesChanged) -> None:
        self.items.append(announcement)
        self._arrived.set()

    async def until(self, version: int) -> None:
        async with asyncio.timeout(10):
            while RoutesChanged(version) not in self.items:
                self._arrived.clear()
                await self._arrived.wait()


async def test_the_publisher_hears_itself_before_publish_returns(live: LiveState) -> None:
    announcements = Announcements(live, "one")
    heard = Heard(announcements)
    await announcements.start()
    await announcements.publish(RoutesChanged(3))
    await announcements.publish(KeysChanged())
    assert heard.items == [RoutesChanged(3)]
    await announcements.stop()


async def test_other_processes_hear_it_once(redis_url: str) -> None:
    lives = [LiveState(redis_url) for _ in range(3)]
    processes = [Announcements(live, str(i)) for i, live in enumerate(lives)]
    heard = [Heard(process) for process in processes]
    for process in processes:
        await process.start()
    await processes[0].publish(CancelRequest("acme", "req-1"))
    await processes[0].publish(RoutesChanged(1))
    await processes[1].publish(RoutesChanged(2))
    for listener in heard:
        await listener.until(1)
        await listener.until(2)
        assert sorted(item.version for item in listener.items) == [1, 2]
    for process, live in zip(processes, lives, strict=True):
        await process.stop()
        await live.close()


async def test_a_quiet_channel_is_no_outage(redis_url: str) -> None:
    live = LiveState(redis_url)
    announcements = Announcements(live, "one")
    heard = Heard(announcements)
    await announcements.start()
    await asyncio.sleep(1.2)  # longer than a command may take
    other = LiveState(redis_url)
    await Announcements(other, "two").publish(RoutesChanged(1))
    await heard.until(1)
    assert live.outages == 0
    await announcements.stop()
    await live.close()
    await other.close()


async def test_what_cannot_be_read_or_handled_ends_nothing(redis_url: str) -> None:
    live, other = LiveState(redis_url), LiveState(redis_url)
    announcements = Announcements(live, "one")

    async def broken(_: RoutesChanged) -> None:
        raise KeyError

    announcements.subscribe(RoutesChanged, broken)
    heard = Heard(announcements)
    await announcements.start()
    assert other.server is not None
    await other.server.publish(CHANNEL, b"not an announcement")
    await Announcements(other, "two").publish(RoutesChanged(1))
    await heard.until(1)
    await announcements.stop()
    await live.close()
    await other.close()


async def test_listening_goes_on_when_redis_comes_back(
    short_folder: Path, run_redis: Callable[..., object]
) -> None:
    socket = short_folder / "reborn.sock"
    with run_redis(socket) as url:
        live = LiveState(url)
        announcements = Announcements(live, "one")
        heard = Heard(announcements)
        await announcements.start()
    await announcements.publish(RoutesChanged(1))
    assert heard.items == [RoutesChanged(1)]
    with run_redis(socket) as url:
        other = LiveState(url)
        publisher = Announcements(other, "two")
        async with asyncio.timeout(20):
            while len(heard.items) == 1:
                await publisher.publish(RoutesChanged(2))
                await asyncio.sleep(0.05)
        assert heard.items[1] == RoutesChanged(2)
        await announcements.stop()
        await live.close()
        await other.close()
