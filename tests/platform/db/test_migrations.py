"""The migrations make exactly the tables that the models say, and undo them."""

from typing import Protocol

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, inspect, text

from polyloom.platform.db import migrate
from polyloom.platform.db.engine import create_engine
from polyloom.platform.db.metadata import METADATA


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
    assert await tables(empty_url) == {*METADATA.tables, "alembic_version"}
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


async def test_tenants_of_before_have_weight_one_and_stay_when_going_back(empty_url: str) -> None:
    await migrate.upgrade(empty_url, "0001")
    engine = create_engine(empty_url)
    async with engine.begin() as connection:
        await connection.execute(
            text(
                "INSERT INTO tenant (slug, state, created_at)"
                " VALUES ('acme', 'active', '2026-01-01 00:00:00')"
            )
        )
        await connection.execute(
            text(
                "INSERT INTO api_key (tenant_id, key_hash, prefix, scopes, created_at)"
                " SELECT id, 'h', 'p', '[]', '2026-01-01 00:00:00' FROM tenant"
            )
        )
    await migrate.upgrade(empty_url)
    async with engine.connect() as connection:
        assert (await connection.scalars(text("SELECT weight FROM tenant"))).all() == [1.0]
    await engine.dispose()
    await migrate.downgrade(empty_url, "0001")
    engine = create_engine(empty_url)
    async with engine.connect() as connection:
        rows = await connection.execute(text("SELECT slug, key_hash FROM tenant, api_key"))
        assert [tuple(row) for row in rows] == [("acme", "h")]
    await engine.dispose()


async def test_the_models_are_the_migrated_schema(database_url: str) -> None:
    def difference(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, METADATA))

    engine = create_engine(database_url)
    async with engine.connect() as connection:
        found = await connection.run_sync(difference)
    await engine.dispose()
    assert found == []


async def test_an_old_schema_is_named(empty_url: str) -> None:
    with pytest.raises(migrate.SchemaOutdated, match="polyloom db upgrade"):
        await migrate.check(empty_url)
