"""`polyloom routes`: public names that lead to weighted revisions, and their gates."""

from pathlib import Path

import msgspec
import rich_click as click

from polyloom.platform.cli.client import (
    Json,
    Server,
    name_path,
    print_json,
    print_table,
    server_options,
)


@click.group()
def routes() -> None:
    """Public model names that lead to weighted revisions."""


@routes.command("set")
@click.argument("name")
@click.argument("targets", nargs=-1, required=True, metavar="MODEL[=WEIGHT]…")
@click.option(
    "--drafts",
    help="off, latency, adaptive or a length: how its requests are drafted for; the server's way if"
    " not given.",
)
@click.option("--reason", help="For the history.")
@click.option("--dry-run", is_flag=True, help="Say what would change, and change nothing.")
@server_options
def set_route(
    server: Server,
    as_json: bool,
    name: str,
    targets: tuple[str, ...],
    drafts: str | None,
    reason: str | None,
    dry_run: bool,
) -> None:
    """Lead NAME to one or more models, such as support@3=95 support@4=5. A target may be a
    revision, an alias, a digest or a base."""
    body = {
        "targets": [_target(text) for text in targets],
        "drafts": int(drafts) if drafts is not None and drafts.isdecimal() else drafts,
        "reason": reason,
    }
    query = {"dry_run": "true"} if dry_run else {}
    answer = server.call("PUT", f"/v1/routes/{name_path(name)}", params=query, json=body)
    if as_json:
        print_json(answer)
    elif dry_run:
        _print_plan(answer)
    else:
        _print_route(answer)


@routes.command("list")
@server_options
def list_routes(server: Server, as_json: bool) -> None:
    """Your routes and where they lead."""
    answer = server.call("GET", "/v1/routes")
    if as_json:
        print_json(answer)
        return
    rows: list[list[object]] = [
        [route["name"], route["version"], _targets(route), route["changed_at"][:19]]
        for route in answer["data"]
    ]
    print_table("Routes", ["name", "version", "leads to", "since"], rows)


@routes.command()
@click.argument("name")
@server_options
def show(server: Server, as_json: bool, name: str) -> None:
    """Where NAME leads now."""
    answer = server.call("GET", f"/v1/routes/{name_path(name)}")
    print_json(answer) if as_json else _print_route(answer)


@routes.command()
@click.argument("name")
@server_options
def versions(server: Server, as_json: bool, name: str) -> None:
    """Every version of NAME, newest first."""
    answer = server.call("GET", f"/v1/routes/{name_path(name)}/versions")
    if as_json:
        print_json(answer)
        return
    rows: list[list[object]] = [
        [
            v["version"],
            _targets(v),
            v["changed_at"][:19],
            v["author"],
            v["reason"] if v["restores"] is None else f"restores {v['restores']}",
        ]
        for v in answer["data"]
    ]
    print_table(name, ["version", "leads to", "since", "author", "reason"], rows)


@routes.command()
@click.argument("name")
@click.option("--to", "version", type=int, help="Which version; the one before if not given.")
@click.option("--reason", help="For the history.")
@server_options
def rollback(
    server: Server, as_json: bool, name: str, version: int | None, reason: str | None
) -> None:
    """Lead NAME where an older version led."""
    body = {"version": version, "reason": reason}
    answer = server.call("POST", f"/v1/routes/{name_path(name)}/rollback", json=body)
    print_json(answer) if as_json else _print_route(answer)


@routes.command()
@click.argument("name")
@click.option("--reason", help="For the history.")
@click.confirmation_option(prompt="Requests for it will fail. Delete it?")
@server_options
def delete(server: Server, as_json: bool, name: str, reason: str | None) -> None:
    """Take NAME away; `rollback` brings it back."""
    query = {} if reason is None else {"reason": reason}
    answer = server.call("DELETE", f"/v1/routes/{name_path(name)}", params=query)
    print_json(answer) if as_json else click.echo(f"{answer['name']} is deleted")


@click.group()
def gates() -> None:
    """Golden prompts that a revision must answer before an alias or a route leads to it."""


def _subject(adapter: str | None, route: str | None) -> str:
    if (adapter is None) == (route is None):
        raise click.UsageError("name either --adapter or --route")
    return (
        f"/v1/routes/{name_path(route)}/gate"
        if adapter is None and route is not None
        else f"/v1/adapters/{name_path(adapter or '')}/gate"
    )


@gates.command("set")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--adapter")
@click.option("--route")
@server_options
def set_gate(
    server: Server, as_json: bool, file: Path, adapter: str | None, route: str | None
) -> None:
    """Replace the prompts by those in FILE, a JSON list of them (docs/api.md); an empty list opens
    the gate."""
    try:
        prompts = msgspec.json.decode(file.read_bytes())
    except msgspec.DecodeError as error:
        raise click.ClickException(f"{file} is not JSON: {error}") from error
    answer = server.call("PUT", _subject(adapter, route), json={"prompts": prompts})
    if as_json:
        print_json(answer)
        return
    click.echo(f"the gate has {len(answer['prompts'])} prompts (version {answer['version']})")


@gates.command("runs")
@click.option("--adapter")
@click.option("--route")
@server_options
def gate_runs(server: Server, as_json: bool, adapter: str | None, route: str | None) -> None:
    """Who passed the gate and who did not, newest first."""
    answer = server.call("GET", _subject(adapter, route) + "/runs")
    if as_json:
        print_json(answer)
        return
    rows: list[list[object]] = [
        [run["created_at"][:19], run["candidate"], "passed" if run["passed"] else _failure(run)]
        for run in answer["data"]
    ]
    print_table("Gate runs", ["at", "candidate", "outcome"], rows)


def _failure(run: Json) -> str:
    failed = next(r for r in run["results"] if r["expected"] is not None)
    return f"{failed['name']}: expected one that {failed['expected']}, got {failed['got']!r}"


def _target(text: str) -> dict[str, str | int]:
    model, equals, weight = text.rpartition("=")
    if not equals:
        return {"model": text, "weight": 1}
    if not weight.isdecimal():
        raise click.BadParameter(f"{weight!r} is no weight", param_hint=text)
    return {"model": model, "weight": int(weight)}


def _targets(route: Json) -> str:
    if not route["targets"]:
        return "(deleted)"
    return ", ".join(f"{t['model']}={t['weight']}" for t in route["targets"])


def _print_route(route: Json) -> None:
    drafts = "" if route["drafts"] is None else f", drafts: {route['drafts']}"
    click.echo(f"{route['name']} (version {route['version']}) → {_targets(route)}{drafts}")


def _print_plan(plan: Json) -> None:
    rows: list[list[object]] = [
        [
            t["model"],
            t["revision"],
            f"{t['share_before']:.1%}",
            f"{t['share_after']:.1%}",
            t["refusal"],
        ]
        for t in plan["targets"]
    ]
    print_table(
        f"{plan['name']}, if changed", ["target", "now", "before", "after", "refused"], rows
    )
    for refusal in plan["refusals"]:
        click.echo(f"would be refused: {refusal}")
