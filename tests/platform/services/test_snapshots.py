"""Snapshots follow the record: here at once, elsewhere by announcement or polling, never back."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyloom.platform.coordination.announcements import Announcements
from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.db.engine import Database
from polyloom.platform.db.repositories import RouteVersionRepository
from polyloom.platform.services.blobs import BlobStore
from polyloom.platform.services.snapshots import SnapshotService
from polyloom.routing.errors import ModelNotFound, NoDefaultRevision, RevisionRetired
from polyloom.routing.resolver import resolve

if TYPE_CHECKING:
    from conftest import Process

BASE = "sha256:" + "b" * 64


def label(process: "Process", model: str, tenant: str = "acme") -> str:
    return resolve(process.snapshots.current, tenant, model).label


async def test_a_change_is_in_force_when_it_returns(process: "Process") -> None:
    acme = await process.tenant()
    assert label(process, "tiny") == "tiny"
    revision, _ = await process.upload(acme, "a")
    with pytest.raises(ModelNotFound, match="checking"):
        label(process, "support@1")
    await process.ready(acme, "b")
    assert label(process, "support@2") == "support@2"
    with pytest.raises(NoDefaultRevision):
        label(process, "support")
    await process.aliases.move(acme.id, "support", "prod", 2, author="key:1")
    found = resolve(process.snapshots.current, "acme", "support")
    assert found.label == "support@2"
    assert found.adapter is not None
    assert Path(found.adapter.path) == process.blobs.path(found.adapter.digest)
    await process.registry.retire(acme.id, "support", 2, author="key:1")
    with pytest.raises(RevisionRetired):
        label(process, "support")
    with pytest.raises(ModelNotFound):
        label(process, f"support@{revision.digest[:15]}")


async def test_versions_grow_with_every_change_and_survive_a_restart(
    process: "Process", tmp_path: Path
) -> None:
    acme = await process.tenant()
    versions = [process.snapshots.current.version]
    for text in ("a", "b"):
        await process.ready(acme, text, promote="prod")
        versions.append(process.snapshots.current.version)
    await process.aliases.rollback(acme.id, "support", "prod", author="key:1")
    versions.append(process.snapshots.current.version)
    assert versions == sorted(set(versions))
    live = LiveState()
    restarted = SnapshotService(
        process.database, process.blobs, Announcements(live, "two"), served=[BASE]
    )
    assert await restarted.refresh() == process.snapshots.current
    await live.close()


async def test_a_base_that_is_not_served_cannot_be_named(process: "Process") -> None:
    acme = await process.tenant()
    await process.ready(acme, "a", promote="prod")
    await process.register_base("elsewhere", "sha256:" + "e" * 64)
    with pytest.raises(ModelNotFound):
        label(process, "elsewhere")
    live = LiveState()
    other = SnapshotService(
        process.database, process.blobs, Announcements(live, "two"), served=["sha256:" + "e" * 64]
    )
    await other.refresh()
    with pytest.raises(ModelNotFound, match="another base"):
        resolve(other.current, "acme", "support")
    await live.close()


async def test_a_base_may_keep_its_name_under_a_new_digest(process: "Process") -> None:
    await process.register_base("tiny", "sha256:" + "e" * 64)
    assert label(process, "tiny") == "tiny"
    await process.register_base("renamed")
    assert label(process, "renamed") == "renamed"
    assert [base.name for base in await process.bases.list()] == ["renamed", "tiny"]


async def follow(service: SnapshotService, version: int) -> None:
    async with asyncio.timeout(10):
        while service.current.version < version:
            await asyncio.sleep(0.01)


async def test_another_process_follows_by_polling(process: "Process") -> None:
    live = LiveState()
    other = SnapshotService(
        process.database,
        BlobStore(process.blobs.path(BASE).parent.parent),
        Announcements(live, "two"),
        served=[BASE],
        poll_interval=0.02,
    )
    await other.start()
    acme = await process.tenant()
    await process.ready(acme, "a", promote="prod")
    await follow(other, process.snapshots.current.version)
    assert other.current == process.snapshots.current
    await other.stop()
    await live.close()


async def test_another_process_follows_by_announcement(
    process: "Process", redis_url: str, database: Database
) -> None:
    lives = [LiveState(redis_url), LiveState(redis_url)]
    here, there = (Announcements(live, str(i)) for i, live in enumerate(lives))
    services = [
        SnapshotService(database, process.blobs, one, served=[BASE], poll_interval=3_600)
        for one in (here, there)
    ]
    await there.start()
    for service in services:
        await service.start()
    async with database.write() as session:
        version = await RouteVersionRepository(session).advance()
    await services[0].routes_changed()
    await follow(services[1], version)
    await there.stop()
    for service, live in zip(services, lives, strict=True):
        await service.stop()
        await live.close()


async def test_readers_never_see_half_a_switch(process: "Process") -> None:
    """While an alias is moved to and fro, every resolution is one whole state, in order."""
    acme = await process.tenant()
    await process.ready(acme, "a", promote="prod")
    await process.ready(acme, "b")
    done = asyncio.Event()
    seen: list[tuple[int, str]] = []

    async def read() -> None:
        while not done.is_set():
            snapshot = process.snapshots.current
            found = resolve(snapshot, "acme", "support")
            assert found.route_version == snapshot.version
            seen.append((found.route_version, found.label))
            await asyncio.sleep(0)

    reader = asyncio.create_task(read())
    expected = {(process.snapshots.current.version, "support@1")}
    for i in range(20):
        await process.aliases.move(acme.id, "support", "prod", 2 - i % 2, author="key:1")
        expected.add((process.snapshots.current.version, f"support@{2 - i % 2}"))
    done.set()
    await reader
    assert seen == sorted(seen, key=lambda pair: pair[0])
    assert set(seen) <= expected


async def test_routes_go_on_serving_while_the_database_is_away(process: "Process") -> None:
    acme = await process.tenant()
    await process.ready(acme, "a", promote="prod")
    lost = Database(f"sqlite:///{process.blobs.path(BASE).parent}")
    live = LiveState()
    service = SnapshotService(
        process.database, process.blobs, Announcements(live, "two"), served=[BASE]
    )
    await service.refresh()
    service._database = lost
    await service.routes_changed()
    assert resolve(service.current, "acme", "support").label == "support@1"
    await lost.close()
    await live.close()
