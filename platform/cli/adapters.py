"""`polyloom adapters`: push, look, promote, roll back, retire."""

from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import rich_click as click

from polyloom.platform.cli.client import (
    Json,
    Server,
    name_path,
    print_json,
    print_table,
    raise_for_error,
    server_options,
    unreachable,
)
from polyloom.platform.cli.packing import packed

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

CHUNK_BYTES = 1 << 18


@click.group()
def adapters() -> None:
    """Upload fine-tunes and decide which revision answers."""


@adapters.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--name", required=True, help="The adapter; created by its first revision.")
@click.option("--promote", metavar="ALIAS", help="Alias to move once it is ready, say prod.")
@click.option("--wait/--no-wait", default=True, help="Wait for the checks.", show_default=True)
@server_options
def push(
    server: Server, as_json: bool, path: Path, name: str, promote: str | None, wait: bool
) -> None:
    """Upload PATH, a PEFT folder or an archive of one, as the next revision of an adapter."""
    import httpx

    query = {"wait": "true" if wait else "false"} | ({"promote": promote} if promote else {})
    with (
        packed(path) as upload,
        server.connect() as client,
        _progress(hidden=as_json) as progress,
    ):
        headers = {"content-type": upload.content_type, "content-length": str(upload.size)}
        task = progress.add_task(f"upload {name}", total=upload.size)
        try:
            response = client.post(
                f"/v1/adapters/{name_path(name)}/revisions",
                params=query,
                headers=headers,
                content=_chunks(upload.file, progress, task, wait),
            )
        except httpx.TransportError as error:
            raise unreachable(server.url, error) from error
        raise_for_error(response)
    revision: Json = response.json()
    if as_json:
        print_json(revision)
        return
    news = "" if response.status_code == 201 else " (that content was there already)"
    click.echo(f"{revision['adapter']}@{revision['number']} is {revision['state']}{news}")
    click.echo(f"  digest      {revision['digest']}")
    if revision["max_logprob_diff"] is not None:
        click.echo(f"  fidelity    {revision['max_logprob_diff']:.2e} from PEFT's logprobs")
    if revision["not_promoted"] is not None:
        click.echo(f"  not promoted: {revision['not_promoted']}")
    elif promote and revision["state"] == "ready":
        click.echo(f"  promoted    {promote}")


@adapters.command("list")
@server_options
def list_adapters(server: Server, as_json: bool) -> None:
    """Your adapters and where their aliases point."""
    answer = server.call("GET", "/v1/adapters")
    if as_json:
        print_json(answer)
        return
    rows: list[list[object]] = []
    for adapter in answer["data"]:
        aliases = ", ".join(f"{a['name']} → {a['number']}" for a in adapter["aliases"])
        newest = adapter["revisions"][0] if adapter["revisions"] else None
        rows.append(
            [
                adapter["name"],
                len(adapter["revisions"]),
                f"{newest['number']} ({newest['state']})" if newest else None,
                aliases,
            ]
        )
    print_table("Adapters", ["name", "revisions", "newest", "aliases"], rows)


@adapters.command()
@click.argument("name")
@server_options
def revisions(server: Server, as_json: bool, name: str) -> None:
    """The revisions of an adapter, newest first."""
    answer = server.call("GET", f"/v1/adapters/{name_path(name)}")
    if as_json:
        print_json(answer)
        return
    rows: list[list[object]] = [
        [
            r["number"],
            r["state"],
            r["digest"][:19],
            r["rank"],
            None if r["max_logprob_diff"] is None else f"{r['max_logprob_diff']:.2e}",
            r["created_at"][:19],
            r["failure"],
        ]
        for r in answer["revisions"]
    ]
    columns = ["number", "state", "digest", "rank", "fidelity", "created", "failure"]
    print_table(answer["name"], columns, rows)


@adapters.command()
@click.argument("name")
@click.argument("revision", type=int)
@click.option("--alias", default="prod", show_default=True)
@click.option("--reason", help="For the history.")
@server_options
def promote(
    server: Server, as_json: bool, name: str, revision: int, alias: str, reason: str | None
) -> None:
    """Point an alias of adapter NAME at REVISION."""
    path = f"/v1/adapters/{name_path(name)}/aliases/{name_path(alias)}"
    answer = server.call("PUT", path, json={"revision": revision, "reason": reason})
    _print_alias(answer, as_json)


@adapters.command()
@click.argument("name")
@click.option("--alias", default="prod", show_default=True)
@click.option("--reason", help="For the history.")
@server_options
def rollback(server: Server, as_json: bool, name: str, alias: str, reason: str | None) -> None:
    """Point an alias of adapter NAME where it pointed before."""
    path = f"/v1/adapters/{name_path(name)}/aliases/{name_path(alias)}/rollback"
    answer = server.call("POST", path, json={"reason": reason})
    _print_alias(answer, as_json)


@adapters.command()
@click.argument("name")
@click.argument("revision", type=int)
@click.option("--force", is_flag=True, help="Even if a route leads to it.")
@click.confirmation_option(prompt="Retire it for good?")
@server_options
def retire(server: Server, as_json: bool, name: str, revision: int, force: bool) -> None:
    """Take REVISION of adapter NAME out of service for good."""
    path = f"/v1/adapters/{name_path(name)}/revisions/{revision}"
    answer = server.call("DELETE", path, params={"force": "true"} if force else {})
    if as_json:
        print_json(answer)
        return
    click.echo(f"{answer['adapter']}@{answer['number']} is {answer['state']}")


def _print_alias(answer: Json, as_json: bool) -> None:
    if as_json:
        print_json(answer)
        return
    click.echo(
        f"{answer['adapter']}@{answer['name']} → {answer['number']} ({answer['digest'][:19]})"
    )


def _progress(*, hidden: bool) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    disable = hidden or not console.is_terminal
    return Progress(*columns, console=console, transient=True, disable=disable)


def _chunks(file: IO[bytes], progress: "Progress", task: "TaskID", wait: bool) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk
        progress.advance(task, len(chunk))
    if wait:
        progress.update(task, description="checking against PEFT")
