"""`polyloom draft-heads`: train, push, look, promote, retire."""

from pathlib import Path

import rich_click as click

from polyloom.platform.cli.client import (
    Json,
    Server,
    name_path,
    print_json,
    print_table,
    server_options,
)
from polyloom.platform.cli.packing import HEAD_CONFIG, packed

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
REVISION_HELP = "NAME@REVISION whose heads they are; without it the base's shared ones (admin key)."


@click.group("draft-heads")
def draft_heads() -> None:
    """Small networks that guess an adapter's next tokens, so that several come out of a step."""


@draft_heads.command()
@click.option(
    "--base",
    is_flag=False,
    flag_value="",
    help="Train a shared head for this base (the default one without a value); with --adapter, the"
    " base that the adapter is for.",
)
@click.option(
    "--adapter", help="Train a head for NAME@REVISION of the server, or for a PEFT folder."
)
@click.option(
    "--shared",
    type=FOLDER,
    help="The shared head to train a delta on; the server's promoted one if not given.",
)
@click.option("--prompts", type=FILE, required=True, help="JSON lines: prompts to learn from.")
@click.option(
    "--held-out", type=FILE, help="Prompts for the gate; a tenth of --prompts if not given."
)
@click.option("--out", type=FOLDER, required=True, help="Folder for the head.")
@click.option("--minutes", type=float, help="Begin no epoch after so long.")
@click.option("--epochs", type=int, default=8, show_default=True)
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Of a response.")
@click.option("--rank", type=int, default=64, show_default=True, help="Of an adapter's head.")
@click.option("--threads", type=int, default=1, show_default=True)
@click.option("--data-dir", envvar="POLYLOOM_DATA_DIR", type=FOLDER)
@server_options
def train(
    server: Server,
    as_json: bool,
    base: str | None,
    adapter: str | None,
    shared: Path | None,
    prompts: Path,
    held_out: Path | None,
    out: Path,
    minutes: float | None,
    epochs: int,
    max_tokens: int,
    rank: int,
    threads: int,
    data_dir: Path | None,
) -> None:
    """Train a head on the model's own answers to PROMPTS, and say whether it is worth having.

    A line of a prompts file is {"messages": […]}, {"prompt": "…"} or plain text in quotes. Killed,
    it goes on where it was when it is started again with the same inputs. It ends with the gate: the
    head must draft better than n-grams, and an adapter's better than the shared head, on held-out
    prompts, by more than chance.
    """
    from polyloom.platform.cli.head_training import TrainingInputs, train_head

    if base is None and adapter is None:
        raise click.UsageError("say --base or --adapter NAME@REVISION")
    inputs = TrainingInputs(
        base=base or None,
        adapter=adapter,
        shared=shared,
        prompts=prompts,
        held_out=held_out,
        out=out,
        minutes=minutes,
        epochs=epochs,
        max_tokens=max_tokens,
        rank=rank,
        threads=threads,
        data_dir=data_dir,
    )
    config = train_head(inputs, server)
    gate = config.training.gate if config.training else None
    if as_json:
        print_json(config)
        return
    click.echo(f"the head is in {out}")
    if gate is not None:
        shared_head = "" if gate.shared_head is None else f"shared head {gate.shared_head:.2f}, "
        click.echo(
            f"  acceptance length at {gate.drafts} drafts, {gate.prompts} held-out prompts:"
            f" {gate.head:.2f} ({shared_head}n-gram {gate.ngram:.2f})"
        )
        click.echo(f"  gain over the best of them, lower bound: {gate.gain_lower_bound:+.3f}")
        verdict = "passed: push it with --promote" if gate.passed else "not passed: not worth it"
        click.echo(f"  gate {verdict}")


@draft_heads.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("--adapter", metavar="NAME@REVISION", help=REVISION_HELP)
@click.option("--promote", is_flag=True, help="Draft with it at once.")
@server_options
def push(server: Server, as_json: bool, path: Path, adapter: str | None, promote: bool) -> None:
    """Upload PATH, a head's folder or an archive of one."""
    with packed(path, HEAD_CONFIG) as upload:
        view = server.call(
            "POST",
            _heads(server, adapter),
            params={"promote": "true" if promote else "false"},
            headers={"content-type": upload.content_type, "content-length": str(upload.size)},
            content=upload.file.read(),
        )
    _say(view, as_json)


@draft_heads.command("list")
@click.option("--adapter", metavar="NAME@REVISION", help=REVISION_HELP)
@server_options
def list_heads(server: Server, as_json: bool, adapter: str | None) -> None:
    """The heads of a revision, or of the base."""
    answer = server.call("GET", _heads(server, adapter))
    if as_json:
        print_json(answer)
        return
    rows: list[list[object]] = [
        [
            head["number"],
            head["state"],
            "drafts" if head["promoted"] else None,
            head["digest"][:19],
            head["rank"],
            _gain(head),
            head["created_at"][:19],
        ]
        for head in answer["data"]
    ]
    columns = ["number", "state", "promoted", "digest", "rank", "accepts", "created"]
    print_table(adapter or "shared heads", columns, rows)


@draft_heads.command()
@click.argument("number", type=int)
@click.option("--adapter", metavar="NAME@REVISION", help=REVISION_HELP)
@server_options
def promote(server: Server, as_json: bool, number: int, adapter: str | None) -> None:
    """Draft with head NUMBER from now on."""
    _say(server.call("POST", f"{_heads(server, adapter)}/{number}/promote"), as_json)


@draft_heads.command()
@click.argument("number", type=int)
@click.option("--adapter", metavar="NAME@REVISION", help=REVISION_HELP)
@server_options
def retire(server: Server, as_json: bool, number: int, adapter: str | None) -> None:
    """Take head NUMBER out of service for good."""
    _say(server.call("DELETE", f"{_heads(server, adapter)}/{number}"), as_json)


def revision_of(server: Server, reference: str) -> tuple[str, int]:
    """Adapter and number of NAME@NUMBER or NAME@ALIAS."""
    name, at, suffix = reference.rpartition("@")
    if not at or not name or not suffix:
        raise click.ClickException(f"{reference!r} is not NAME@REVISION")
    if suffix.isascii() and suffix.isdigit():
        return name, int(suffix)
    alias = server.call("GET", f"/v1/adapters/{name_path(name)}/aliases/{name_path(suffix)}")
    return name, int(alias["number"])


def _heads(server: Server, adapter: str | None) -> str:
    """Where the heads of an owner are."""
    if adapter is None:
        return "/admin/draft-heads"
    name, number = revision_of(server, adapter)
    return f"/v1/adapters/{name_path(name)}/revisions/{number}/draft-heads"


def _say(head: Json, as_json: bool) -> None:
    if as_json:
        print_json(head)
        return
    drafts = "drafts" if head["promoted"] else "does not draft"
    click.echo(f"{head['owner']} draft head {head['number']} is {head['state']} and {drafts}")
    click.echo(f"  digest      {head['digest']}")


def _gain(head: Json) -> str | None:
    gate = (head["training"] or {}).get("gate")
    return f"{gate['head']:.2f} at {gate['drafts']}" if gate else None
