"""One database, SQLite or PostgreSQL, behind two kinds of session: reading and writing.

A reading session sees one consistent state from its first statement to its last. A writing session
commits at the end of its block or not at all. On SQLite it takes the write lock at once: a
transaction that reads first and writes later could otherwise not be serialised and would fail.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

from sqlalchemy import URL, event, make_url, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)

from polyloom.platform.cancelling import being_cancelled
from polyloom.platform.errors import DatabaseUnavailable

SQLITE_BUSY_SECONDS = 30.0
CONNECT_SECONDS = 10.0
STATEMENT_SECONDS = 30.0
"""A database that has said nothing for so long has lost the connection."""
_NOT_NOW = ("08", "53", "57", "58")
"""Classes of SQLSTATE that speak of the server and not of the statement: connections, resources,
an operator's shutdown, the system."""


def async_url(url: str) -> URL:
    """`url` for the asynchronous driver.

    `sqlite:///file`, `postgresql://user@host/name` and libpq's socket form
    `postgresql://user@/name?host=<folder>`. Raises ValueError for anything else.
    """
    parsed = make_url(url)
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg"}
    backend = parsed.get_backend_name()
    if backend not in drivers:
        raise ValueError(f"the database must be sqlite or postgresql, not {backend!r}")
    return parsed.set(drivername=drivers[backend])


def create_engine(url: str, *, statement_seconds: float | None = None) -> AsyncEngine:
    """An engine for `url`, with the settings each database needs to be safe under concurrency.

    statement_seconds: the longest that PostgreSQL may take for a statement; None for any time.
    """
    parsed = async_url(url)
    if parsed.get_backend_name() == "postgresql":
        return create_async_engine(
            parsed,
            pool_size=10,
            max_overflow=20,
            pool_pre_ping=True,
            connect_args={"timeout": CONNECT_SECONDS, "command_timeout": statement_seconds},
        )
    if parsed.database and parsed.database != ":memory:":
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_async_engine(parsed, connect_args={"timeout": SQLITE_BUSY_SECONDS})
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    event.listen(engine.sync_engine, "invalidate", _release_sqlite)
    return engine


class _SqliteCursor(Protocol):
    def execute(self, statement: str) -> object: ...
    def close(self) -> None: ...


class _SqliteConnection(Protocol):
    isolation_level: str | None

    def cursor(self) -> _SqliteCursor: ...
    def rollback(self) -> None: ...


def _prepare_sqlite(connection: _SqliteConnection, _record: object) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    mode = "IMMEDIATE" if connection.get_execution_options().get("writes") else "DEFERRED"
    connection.exec_driver_sql(f"BEGIN {mode}")


def _release_sqlite(connection: _SqliteConnection, *_: object) -> None:
    """A connection that is closed within a statement (its task was cancelled) keeps the write lock
    until that statement is collected as garbage: give the lock back first."""
    connection.rollback()


class Database:
    """Sessions on one database. Opens no connection before the first session."""

    def __init__(self, url: str) -> None:
        """url: as `async_url` takes it. Raises ValueError for another kind of database."""
        self.engine = create_engine(url, statement_seconds=STATEMENT_SECONDS)
        reading = self.engine
        if self.engine.dialect.name == "postgresql":
            reading = self.engine.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )
        self._read = async_sessionmaker(reading, expire_on_commit=False)
        self._write = async_sessionmaker(
            self.engine.execution_options(writes=True), expire_on_commit=False
        )

    @asynccontextmanager
    async def read(self) -> AsyncGenerator[AsyncSession]:
        """A session that sees one state. Raises DatabaseUnavailable."""
        with _translated_errors():
            async with self._read() as session:
                await _connect(session)
                yield session

    @asynccontextmanager
    async def write(self) -> AsyncGenerator[AsyncSession]:
        """A transaction, committed at the end of the block. Raises DatabaseUnavailable."""
        with _translated_errors():
            async with self._write() as session, session.begin():
                await _connect(session)
                yield session

    async def ping(self) -> None:
        """Raises DatabaseUnavailable unless the database answers."""
        async with self.read() as session:
            await session.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Close all connections."""
        await self.engine.dispose()


async def _connect(session: AsyncSession) -> None:
    try:
        await session.connection()
    except (OSError, PoolTimeout) as error:
        raise DatabaseUnavailable("the database cannot be reached") from error


@contextmanager
def _translated_errors() -> Generator[None]:
    """The one place where a driver's loss of the database becomes DatabaseUnavailable.

    A cancelled statement breaks its connection, and the driver then complains of that: such an
    error must stay a cancellation, or the task that was to end would go on.
    """
    try:
        yield
    except (TimeoutError, SQLAlchemyError, DatabaseUnavailable) as error:
        if being_cancelled():
            raise asyncio.CancelledError from error
        if isinstance(error, TimeoutError):
            raise DatabaseUnavailable("the database does not answer in time") from error
        if _lost(error):
            raise DatabaseUnavailable("the database does not answer") from error
        raise


def _lost(error: Exception) -> bool:
    if not isinstance(error, DBAPIError):
        return False
    state = getattr(error.orig, "sqlstate", None)  # of asyncpg, which makes plain errors of most
    if state is not None and state.startswith(_NOT_NOW):
        return True
    return error.connection_invalidated or isinstance(error, OperationalError | InterfaceError)
