"""The migrations make exactly the tables that the models say, and undo them."""

from typing import Protocol

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from polyloom.platform.db import migrate
from polyloom.platform.db.engine import create_engine
from polyloom.platform.db.models import Record


class Databases(Protocol):
    async def create(self, *, migrated: bool) -> str: ...


@pytest.fixture
async def empty_url(databases: Databases) -> str:
    return await databases.create(migrated=False)


async def tables(url: str) -> set[str]:
    engine = create_engine(url)
    async with engine.connect() as connection:
        found = await connection.run_sync(lambda sync: inspect(sync).get_table_names())
    await engine.dispose()
    return set(found)


async def test_up_and_down_leave_nothing_behind(empty_url: str) -> None:
    assert await migrate.current(empty_url) is None
    await migrate.upgrade(empty_url)
    assert await migrate.current(empty_url) == migrate.head()
    assert await tables(empty_url) == {*Record.metadata.tables, "alembic_version"}
    await migrate.downgrade(empty_url, "base")
    assert await tables(empty_url) == {"alembic_version"}
    await migrate.upgrade(empty_url)
    await migrate.check(empty_url)


async def test_upgrading_twice_changes_nothing(empty_url: str) -> None:
    await migrate.upgrade(empty_url)
    await migrate.upgrade(empty_url)
    engine = create_engine(empty_url)
    async with engine.connect() as connection:
        versions = (await connection.execute(text("SELECT version FROM route_version"))).all()
    await engine.dispose()
    assert [tuple(row) for row in versions] == [(1,)]


async def test_the_models_are_the_migrated_schema(database_url: str) -> None:
    def difference(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, Record.metadata))

    engine = create_engine(database_url)
    async with engine.connect() as connection:
        found = await connection.run_sync(difference)
    await engine.dispose()
    assert found == []


async def test_an_old_schema_is_named(empty_url: str) -> None:
    with pytest.raises(migrate.SchemaOutdated, match="polyloom db upgrade"):
        await migrate.check(empty_url)
