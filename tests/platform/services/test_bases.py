"""Bases: what is cached of one that is replaced is dropped, with the cause in the record."""

from typing import TYPE_CHECKING

from polyloom.platform.coordination.announcements import Announcements
from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.engine.messages import CacheReport, Invalidate
from polyloom.platform.services.bases import BaseService
from polyloom.platform.services.invalidations import Invalidations

if TYPE_CHECKING:
    from conftest import Process

BASE = "sha256:" + "b" * 64
OTHER = "sha256:" + "c" * 64


class Engines:
    """Note what they are told to drop."""

    def __init__(self) -> None:
        self.engines: list[object] = []
        self.told: list[Invalidate] = []

    async def cache_reports(self) -> dict[int, CacheReport]:
        return {}

    async def invalidate(self, command: Invalidate) -> None:
        self.told.append(command)


async def test_only_what_is_replaced_is_invalidated(process: "Process") -> None:
    await process.register_base()
    await process.register_base("renamed")
    await process.register_base()
    await process.register_base("elsewhere", OTHER)
    assert process.invalidated == []
    await process.register_base(template="another")
    template = Invalidate(cause="template_changed", base_digest=BASE, template_digest="none")
    assert process.invalidated == [template]
    for _ in range(2):  # started again, nothing changes
        await process.register_base("tiny", OTHER)
    assert process.invalidated == [template, Invalidate(cause="base_changed", base_digest=BASE)]


async def test_engines_of_other_servers_drop_a_replaced_base_too(process: "Process") -> None:
    live, here, there = LiveState(), Engines(), Engines()
    starting, running = (
        Invalidations(process.database, Announcements(live, name), engines)  # type: ignore[arg-type]
        for name, engines in (("starting", here), ("running", there))
    )
    await running.start()
    await starting.start()

    async def invalidate(command: Invalidate) -> None:
        await starting.invalidate(command, author="server")

    bases = BaseService(process.database, process.snapshots.routes_changed, invalidate)
    await bases.register(
        name="tiny", digest=OTHER, folder="/bases/tiny", template_digest="none", config="{}"
    )
    for server in (starting, running):
        await server.follow()
    command = Invalidate(cause="base_changed", base_digest=BASE)
    assert (here.told, there.told) == ([command], [command])
    (row,) = await running.latest()
    assert (row.cause, row.base_digest, row.author) == ("base_changed", BASE, "server")
    await live.close()
