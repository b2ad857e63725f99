"""Brings a database to a revision of the schema; the scripts travel inside the package."""

import importlib.resources
from collections.abc import Callable

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection

from polyloom.platform.db.engine import create_engine
from polyloom.platform.errors import DatabaseUnavailable


class SchemaOutdated(DatabaseUnavailable):
    """The database is not at the schema revision that this version needs."""


def configuration() -> Config:
    """Alembic's configuration, installed or editable."""
    config = Config()
    config.set_main_option(
        "script_location", str(importlib.resources.files("polyloom.migrations")).replace("%", "%%")
    )
    return config


def head() -> str:
    """The schema revision that this version needs."""
    found = ScriptDirectory.from_config(configuration()).get_current_head()
    if found is None:
        raise RuntimeError("the package holds no migrations")
    return found


async def upgrade(url: str, revision: str = "head") -> None:
    """Bring the database up to `revision`, in one transaction."""
    await _run(url, lambda config: command.upgrade(config, revision))


async def downgrade(url: str, revision: str) -> None:
    """Take the database down to `revision` (`base`: empty), in one transaction."""
    await _run(url, lambda config: command.downgrade(config, revision))


async def current(url: str) -> str | None:
    """The database's schema revision; None for an empty one."""
    engine = create_engine(url)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(
                lambda sync: MigrationContext.configure(sync).get_current_revision()
            )
    finally:
        await engine.dispose()


async def check(url: str) -> None:
    """Raises SchemaOutdated unless the database is at `head()`."""
    found = await current(url)
    if found != head():
        raise SchemaOutdated(
            f"the database's schema is at {found or 'nothing'}, this version needs {head()}:"
            " run `polyloom db upgrade`"
        )


async def _run(url: str, action: Callable[[Config], None]) -> None:
    config = configuration()

    def on_connection(connection: Connection) -> None:
        config.attributes["connection"] = connection
        action(config)

    engine = create_engine(url)
    try:
        async with engine.execution_options(writes=True).begin() as connection:
            await connection.run_sync(on_connection)
    finally:
        await engine.dispose()
