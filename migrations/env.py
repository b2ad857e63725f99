"""Alembic's environment: runs the migrations on the connection it is given.

`polyloom.platform.db.migrate` passes a connection; alembic's own command line takes the database
from `-x url=…`.
"""

import asyncio

from alembic import context
from sqlalchemy.engine import Connection

from polyloom.platform.db.engine import create_engine
from polyloom.platform.db.metadata import METADATA


def run(connection: Connection) -> None:
    """Migrate on `connection`. SQLite cannot alter a table in place: batch mode copies it."""
    context.configure(
        connection=connection,
        target_metadata=METADATA,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


async def run_from_command_line() -> None:
    """Migrate the database named by `-x url=…`."""
    arguments = context.get_x_argument(as_dictionary=True)
    if "url" not in arguments:
        raise SystemExit("name the database: alembic -x url=sqlite:///polyloom.db …")
    engine = create_engine(arguments["url"])
    async with engine.begin() as connection:
        await connection.run_sync(run)
    await engine.dispose()


given = context.config.attributes.get("connection")
if given is None:
    asyncio.run(run_from_command_line())
else:
    run(given)
