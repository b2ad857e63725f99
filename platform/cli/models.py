"""`polyloom models`: base models on this machine, and what a server offers."""

from pathlib import Path

import rich_click as click

from polyloom.platform.cli.client import Server, print_json, print_table, server_options


@click.group()
def models() -> None:
    """Base models."""


@models.command()
@click.argument("reference")
@click.option("--data-dir", envvar="POLYLOOM_DATA_DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def pull(reference: str, data_dir: Path | None, as_json: bool) -> None:
    """Fetch and convert a base: a known name, a folder, a .gguf file or a hub id."""
    from polyloom.platform.cli.pulling import pull_with_progress
    from polyloom.platform.settings import DEFAULT_DATA_DIR

    base = pull_with_progress(reference, data_dir or DEFAULT_DATA_DIR)
    if as_json:
        print_json({"name": base.name, "digest": base.digest, "folder": str(base.folder)})
        return
    click.echo(f"{base.name} is ready")
    click.echo(f"  digest    {base.digest}")
    click.echo(f"  folder    {base.folder}")


@models.command("list")
@server_options
def list_models(server: Server, as_json: bool) -> None:
    """Every name that a request can use as `model` on the server."""
    answer = server.call("GET", "/v1/models")
    if as_json:
        print_json(answer)
        return
    rows: list[list[object]] = [[m["id"], m["owned_by"], m["parent"]] for m in answer["data"]]
    print_table("Models", ["model", "owner", "base"], rows)
