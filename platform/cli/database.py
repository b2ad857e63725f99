"""`polyloom db`: the schema of the record."""

import asyncio
from pathlib import Path

import rich_click as click


@click.group()
@click.option(
    "--database-url",
    envvar="POLYLOOM_DATABASE_URL",
    help="sqlite:///file or postgresql://…; without it the one in the data directory.",
)
@click.option("--data-dir", envvar="POLYLOOM_DATA_DIR", type=click.Path(path_type=Path))
@click.pass_context
def db(context: click.Context, database_url: str | None, data_dir: Path | None) -> None:
    """Bring the database to a schema revision."""
    from polyloom.platform.settings import DEFAULT_DATA_DIR, default_database_url

    context.obj = database_url or default_database_url(data_dir or DEFAULT_DATA_DIR)


@db.command()
@click.argument("revision", default="head")
@click.pass_obj
def upgrade(url: str, revision: str) -> None:
    """Up to REVISION (the newest if not given)."""
    from polyloom.platform.db import migrate

    asyncio.run(migrate.upgrade(url, revision))
    click.echo(f"at {asyncio.run(migrate.current(url))}")


@db.command()
@click.argument("revision")
@click.confirmation_option(prompt="Going down loses the data of the tables it drops. Go on?")
@click.pass_obj
def downgrade(url: str, revision: str) -> None:
    """Down to REVISION; `base` empties the database."""
    from polyloom.platform.db import migrate

    asyncio.run(migrate.downgrade(url, revision))
    click.echo(f"at {asyncio.run(migrate.current(url)) or 'nothing'}")


@db.command()
@click.pass_obj
def current(url: str) -> None:
    """The schema revision that the database is at."""
    from polyloom.platform.db import migrate

    click.echo(asyncio.run(migrate.current(url)) or "nothing")
