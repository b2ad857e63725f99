"""`polyloom cache` and `polyloom prefixes`: what prefix caches give, and what is held in them."""

from pathlib import Path
from typing import Any

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
def cache() -> None:
    """What prompts reuse of earlier ones, and why not."""


@cache.command()
@click.option("--all", "everybody", is_flag=True, help="Of all tenants (admin key).")
@server_options
def report(server: Server, as_json: bool, everybody: bool) -> None:
    """Hits, misses and what they saved; your own recent misses with the text that differed."""
    answer = server.call("GET", "/admin/cache" if everybody else "/v1/cache")
    if as_json:
        print_json(answer)
        return
    account = answer if everybody else answer["account"]
    rows = [_row(_name(n), n["counts"]) for n in account["namespaces"]]
    print_table("Prefix caches", _COLUMNS, [*rows, _row("total", account["total"])])
    total = account["total"]
    click.echo(f"misses: {_listed(total['misses'])}")
    click.echo(f"blocks invalidated: {_listed(total['invalidations'])}")
    wrong = account["isolation"]["cross_namespace_hits"]
    click.echo(f"isolation self-check: {'ok' if wrong == 0 else f'{wrong} WRONG HITS'}")
    for miss in [] if everybody else answer["recent_misses"]:
        _show_miss(miss)


@cache.command()
@click.argument("first", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("second", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@server_options
def explain(server: Server, as_json: bool, first: Path, second: Path) -> None:
    """What sets two requests apart: FIRST and SECOND are JSON bodies of chats or completions."""
    body = {"first": _read(first), "second": _read(second)}
    answer = server.call("POST", "/v1/cache/explain", json=body)
    if as_json:
        print_json(answer)
        return
    click.echo(
        f"{answer['shared_blocks']} blocks ({answer['shared_tokens']} tokens) are shared; the prompts"
        f" begin with {answer['common_tokens']} common tokens of {answer['first_tokens']} and"
        f" {answer['second_tokens']}"
    )
    for difference in answer["differences"]:
        _show_difference(difference)


@cache.command()
@click.option("--tenant", help="Of this tenant's own caches.")
@click.option("--group", help="Of this share group's cache, by its id.")
@click.option("--base", help="Of this base, by digest.")
@click.option("--adapter", help="Of this revision, by digest.")
@server_options
def invalidate(
    server: Server,
    as_json: bool,
    tenant: str | None,
    group: str | None,
    base: str | None,
    adapter: str | None,
) -> None:
    """Drop cached blocks everywhere (admin key); without any option, all of them."""
    if tenant is not None and group is not None:
        raise click.UsageError("give either --tenant or --group")
    owner = None
    if tenant is not None or group is not None:
        kind = "group" if tenant is None else "tenant"
        owner = {"kind": kind, "name": tenant or group}
    body = {"owner": owner, "base": base, "adapter": adapter}
    answer = server.call("POST", "/admin/cache/invalidate", json=body)
    if as_json:
        print_json(answer)
        return
    click.echo(f"invalidated; {_or(answer['blocks_freed'], 'an unknown number of')} blocks freed")


@click.group()
def prefixes() -> None:
    """Beginnings of prompts that are kept warm."""


@prefixes.command()
@click.argument("name")
@click.option("--model", required=True, help="As requests will name it.")
@click.option("--system", help="The system prompt that conversations will begin with.")
@click.option("--prompt", help="The text that completions will begin with.")
@click.option("--cache-salt", help="If the requests will have one.")
@server_options
def hold(
    server: Server,
    as_json: bool,
    name: str,
    model: str,
    system: str | None,
    prompt: str | None,
    cache_salt: str | None,
) -> None:
    """Warm a prefix and hold it as NAME, over restarts, until it is released."""
    body: Json = {"name": name, "model": model, "prompt": prompt, "cache_salt": cache_salt}
    if system is not None:
        body["messages"] = [{"role": "system", "content": system}]
    answer = server.call("POST", "/v1/prefixes", json=body)
    if as_json:
        print_json(answer)
        return
    click.echo(f"{name}: {answer['tokens']} tokens held in {answer['engines']} engines")


@prefixes.command("list")
@server_options
def list_held(server: Server, as_json: bool) -> None:
    """What is held now."""
    answer = server.call("GET", "/v1/prefixes")
    if as_json:
        print_json(answer)
        return
    rows: list[list[object]] = [
        [h["name"], h["model"], h["tokens"], f"{h['engines']}/{h['engines_total']}", h["failure"]]
        for h in answer["data"]
    ]
    print_table("Held prefixes", ["name", "model", "tokens", "engines", "failure"], rows)


@prefixes.command()
@click.argument("name")
@server_options
def release(server: Server, as_json: bool, name: str) -> None:
    """Hold NAME no longer."""
    server.send("DELETE", f"/v1/prefixes/{name_path(name)}")
    click.echo(f"{name} is released" if not as_json else "{}")


_COLUMNS = ["cache", "eligible", "hits", "rate", "tokens", "seconds saved", "blocks", "held"]


def _row(name: str, counts: Json) -> list[object]:
    rate = "" if counts["hit_rate"] is None else f"{counts['hit_rate']:.0%}"
    return [
        name,
        counts["eligible_requests"],
        counts["exact_hits"],
        rate,
        counts["tokens_reused"],
        f"{counts['prefill_seconds_saved']:.1f}",
        counts["cached_blocks"],
        counts["held_blocks"],
    ]


def _name(namespace: Json) -> str:
    what = ", ".join(namespace["revisions"]) or namespace["adapter_digest"] or "base"
    return f"{namespace['owner']['kind']} {namespace['owner']['name']}: {what}"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _show_miss(miss: Json) -> None:
    click.echo(f"{miss['at']} {miss['model']} {miss['request_id']}: {miss['reason']}")
    if miss["found"]:
        click.echo(f"  token {miss['position']}, after {miss['before']!r}")
        click.echo(f"  earlier: {miss['expected']!r}\n  now:     {miss['found']!r}")


def _show_difference(difference: Json) -> None:
    kind = "" if difference["kind"] is None else f" ({difference['kind']})"
    click.echo(f"{difference['field']}{kind}: {difference['advice']}")
    if difference["position"] is not None:
        click.echo(f"  token {difference['position']}, after {difference['before']!r}")
    click.echo(f"  first:  {difference['first']!r}\n  second: {difference['second']!r}")


def _read(path: Path) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError as error:
        raise click.ClickException(f"{path} is not JSON: {error}") from error


def _or(value: object, other: str) -> object:
    return other if value is None else value
