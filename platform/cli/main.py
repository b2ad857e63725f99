"""`polyloom`: the command line. Starting it imports no model code."""

import rich_click as click

from polyloom.platform.cli.adapters import adapters
from polyloom.platform.cli.cache import cache, prefixes
from polyloom.platform.cli.chat import chat
from polyloom.platform.cli.database import db
from polyloom.platform.cli.draft_heads import draft_heads
from polyloom.platform.cli.models import models
from polyloom.platform.cli.routes import gates, routes
from polyloom.platform.cli.serve import serve
from polyloom.platform.cli.shares import shares
from polyloom.platform.cli.tenants import keys, tenants


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="polyloom", prog_name="polyloom")
def cli() -> None:
    """Serve very many LoRA fine-tunes of one base model."""


for command in (
    serve,
    adapters,
    draft_heads,
    routes,
    gates,
    shares,
    prefixes,
    cache,
    chat,
    models,
    tenants,
    keys,
    db,
):
    cli.add_command(command)

if __name__ == "__main__":
    cli()
