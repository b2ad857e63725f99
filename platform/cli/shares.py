"""`polyloom shares`: groups of tenants that call one tenant's revisions, or the base."""

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
def shares() -> None:
    """Share revisions, or the base's prompt cache, with other tenants."""


@shares.command()
@click.argument("name")
@server_options
def create(server: Server, as_json: bool, name: str) -> None:
    """Create a group that you own, and call NAME."""
    _print(server.call("POST", "/v1/share-groups", json={"name": name}), as_json)


@shares.command("list")
@server_options
def list_groups(server: Server, as_json: bool) -> None:
    """Groups that you own, are in, or are invited to."""
    answer = server.call("GET", "/v1/share-groups")
    if as_json:
        print_json(answer)
        return
    rows: list[list[object]] = [
        [g["id"], g["mount"] or "(invited)", g["owner"], _shared(g), _members(g)]
        for g in answer["data"]
    ]
    print_table("Share groups", ["id", "called", "owner", "shares", "members"], rows)


@shares.command()
@click.argument("group")
@click.argument("adapter")
@click.argument("revision", type=int)
@server_options
def add(server: Server, as_json: bool, group: str, adapter: str, revision: int) -> None:
    """Share REVISION of your ADAPTER in your GROUP."""
    path = f"{_path(group)}/adapters/{name_path(adapter)}"
    _print(server.call("PUT", path, json={"revision": revision}), as_json)


@shares.command()
@click.argument("group")
@click.argument("adapter")
@server_options
def revoke(server: Server, as_json: bool, group: str, adapter: str) -> None:
    """Take ADAPTER out of your GROUP, at once."""
    _print(server.call("DELETE", f"{_path(group)}/adapters/{name_path(adapter)}"), as_json)


@shares.command()
@click.argument("group")
@click.option("--off", is_flag=True, help="No longer.")
@server_options
def base(server: Server, as_json: bool, group: str, off: bool) -> None:
    """Let the members of your GROUP call the base in the group's cache."""
    _print(server.call("DELETE" if off else "PUT", f"{_path(group)}/base"), as_json)


@shares.command()
@click.argument("group")
@click.argument("tenant")
@server_options
def invite(server: Server, as_json: bool, group: str, tenant: str) -> None:
    """Invite TENANT, by its slug, to your GROUP."""
    _print(server.call("PUT", f"{_path(group)}/members/{name_path(tenant)}"), as_json)


@shares.command()
@click.argument("group")
@click.argument("tenant")
@server_options
def remove(server: Server, as_json: bool, group: str, tenant: str) -> None:
    """Put TENANT out of your GROUP, at once."""
    _print(server.call("DELETE", f"{_path(group)}/members/{name_path(tenant)}"), as_json)


@shares.command()
@click.argument("group_id")
@click.option("--as", "mount", required=True, help="What you call it: MODEL is <name>/<adapter>.")
@server_options
def accept(server: Server, as_json: bool, group_id: str, mount: str) -> None:
    """Join the group with this id, or call it otherwise."""
    path = f"/v1/memberships/{name_path(group_id)}"
    _print(server.call("PUT", path, json={"mount": mount}), as_json)


@shares.command()
@click.argument("group_id")
@server_options
def leave(server: Server, as_json: bool, group_id: str) -> None:
    """Leave the group with this id, or decline its invitation."""
    server.send("DELETE", f"/v1/memberships/{name_path(group_id)}")
    print_json({"left": group_id}) if as_json else click.echo("left")


@shares.command()
@click.argument("group")
@click.confirmation_option(prompt="End it for all its members?")
@server_options
def delete(server: Server, as_json: bool, group: str) -> None:
    """End your GROUP for all its members."""
    server.send("DELETE", _path(group))
    print_json({"deleted": group}) if as_json else click.echo("deleted")


def _path(group: str) -> str:
    return f"/v1/share-groups/{name_path(group)}"


def _print(group: Json, as_json: bool) -> None:
    if as_json:
        print_json(group)
        return
    click.echo(f"{group['mount']} ({group['id']}) shares {_shared(group)} with {_members(group)}")


def _shared(group: Json) -> str:
    shared = [f"{r['adapter']}@{r['revision']}" for r in group["revisions"]]
    return ", ".join(shared + ["the base"] * group["shares_base"]) or "nothing"


def _members(group: Json) -> str:
    return ", ".join(
        m["tenant"] + (" (invited)" if not m["mount"] else "") for m in group["members"]
    )
