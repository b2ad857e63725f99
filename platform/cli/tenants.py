"""`polyloom tenants` and `polyloom keys`: the operator's side. They need the admin key."""

import rich_click as click

from polyloom.platform.cli.client import Server, print_json, print_table, server_options

SCOPES = ["inference", "adapters:read", "adapters:write", "routes:write", "usage:read", "admin"]
DEFAULT_SCOPES = ["inference", "adapters:read", "adapters:write", "usage:read"]
LIMITS = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "adapters",
    "storage_bytes",
)


@click.group()
def tenants() -> None:
    """Who shares the server (admin key)."""


@tenants.command()
@click.argument("slug")
@click.option("--requests-per-minute", type=int)
@click.option("--tokens-per-minute", type=int)
@click.option("--concurrent-requests", type=int)
@click.option("--adapters", type=int, help="How many adapters it may have.")
@click.option("--storage-bytes", type=int)
@click.option(
    "--weight", type=float, default=1.0, help="Its share of a busy engine.", show_default=True
)
@server_options
def create(server: Server, as_json: bool, slug: str, weight: float, **limits: int | None) -> None:
    """Create a tenant; limits that are not given do not hold."""
    body = {"slug": slug, "limits": limits, "weight": weight}
    answer = server.call("POST", "/admin/tenants", json=body)
    if as_json:
        print_json(answer)
        return
    click.echo(f"tenant {answer['slug']} created; give it a key: polyloom keys create {slug}")


@tenants.command("list")
@server_options
def list_tenants(server: Server, as_json: bool) -> None:
    """All tenants with their limits."""
    answer = server.call("GET", "/admin/tenants")
    if as_json:
        print_json(answer)
        return
    rows: list[list[object]] = [
        [t["slug"], t["state"], t["weight"], *(t["limits"][name] for name in LIMITS)]
        for t in answer["data"]
    ]
    print_table(
        "Tenants", ["slug", "state", "weight", *(n.replace("_", " ") for n in LIMITS)], rows
    )


@click.group()
def keys() -> None:
    """Keys of tenants (admin key)."""


@keys.command("create")
@click.argument("tenant")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(SCOPES),
    default=DEFAULT_SCOPES,
    show_default=True,
)
@click.option("--expires-at", help="Such as 2027-01-31T00:00:00Z; never if not given.")
@server_options
def create_key(
    server: Server, as_json: bool, tenant: str, scopes: tuple[str, ...], expires_at: str | None
) -> None:
    """Issue a key of TENANT. It is shown once."""
    body = {"scopes": list(scopes), "expires_at": expires_at}
    answer = server.call("POST", f"/admin/tenants/{tenant}/keys", json=body)
    if as_json:
        print_json(answer)
        return
    click.echo(answer["key"])
    click.echo(f"key {answer['id']} of {tenant}: {', '.join(answer['scopes'])}", err=True)


@keys.command("list")
@click.argument("tenant")
@server_options
def list_keys(server: Server, as_json: bool, tenant: str) -> None:
    """The keys of TENANT by their first characters."""
    answer = server.call("GET", f"/admin/tenants/{tenant}/keys")
    if as_json:
        print_json(answer)
        return
    rows: list[list[object]] = [
        [k["id"], k["prefix"], ", ".join(k["scopes"]), k["expires_at"], k["revoked_at"]]
        for k in answer["data"]
    ]
    print_table(f"Keys of {tenant}", ["id", "begins", "scopes", "expires", "revoked"], rows)


@keys.command()
@click.argument("tenant")
@click.argument("key_id", type=int)
@server_options
def revoke(server: Server, as_json: bool, tenant: str, key_id: int) -> None:
    """Revoke key KEY_ID of TENANT; it stops working within a second."""
    answer = server.call("DELETE", f"/admin/tenants/{tenant}/keys/{key_id}")
    if as_json:
        print_json(answer)
        return
    click.echo(f"key {answer['id']} of {tenant} is revoked")
