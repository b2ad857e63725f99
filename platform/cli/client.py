"""The command line as a client of a running server."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec
import rich_click as click

if TYPE_CHECKING:
    import httpx

P = ParamSpec("P")
R = TypeVar("R")

Json = dict[str, Any]
"""An answer of the server."""

TIMEOUT_SECONDS = 900.0
"""A push waits for its checks."""
PIPE_WIDTH = 200


class Server:
    """Requests with the caller's key; an error of the server ends the command with its message."""

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")  # as clients of OpenAI's are told it
        self._key = key

    def connect(self) -> "httpx.Client":
        """A client; the caller closes it."""
        import httpx

        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT_SECONDS)

    def call(self, method: str, path: str, **arguments: Any) -> Json:
        """One request and its JSON answer."""
        answer: Json = self.send(method, path, **arguments).json()
        return answer

    def send(self, method: str, path: str, **arguments: Any) -> "httpx.Response":
        """One request and its whole answer, which may be empty."""
        import httpx

        with self.connect() as client:
            try:
                response = client.request(method, path, **arguments)
            except httpx.TransportError as error:
                raise unreachable(self.url, error) from error
            raise_for_error(response)
            return response


def unreachable(url: str, error: Exception) -> click.ClickException:
    """The server does not answer at all."""
    reason = str(error) or type(error).__name__
    return click.ClickException(
        f"no server answers at {url} ({reason}); start one with `polyloom serve`, "
        "or say where it is with --url or POLYLOOM_URL"
    )


def raise_for_error(response: "httpx.Response") -> None:
    """End the command with the server's own words if this is an error."""
    if response.is_success:
        return
    response.read()
    try:
        error = response.json()["error"]
        message = f"{error['message']} [{error['code']}]"
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {response.status_code}"
    if response.status_code == 401:
        message += "; give your key with --key or POLYLOOM_API_KEY"
    raise click.ClickException(message)


def name_path(name: str) -> str:
    """A name as one part of a path."""
    from urllib.parse import quote

    return quote(name, safe="")


def server_options(command: Callable[..., R]) -> Callable[..., R]:
    """Adds --url, --key and --json; the command gets `server` and `as_json`."""

    @click.option(
        "--url",
        envvar="POLYLOOM_URL",
        default="http://127.0.0.1:8000",
        show_default=True,
        help="Where the server is (POLYLOOM_URL).",
    )
    @click.option("--key", envvar="POLYLOOM_API_KEY", help="Your key (POLYLOOM_API_KEY).")
    @click.option("--json", "as_json", is_flag=True, help="Print the server's answer as JSON.")
    @wraps(command)
    def wrapper(*args: Any, url: str, key: str | None, as_json: bool, **kwargs: Any) -> R:
        return command(*args, server=Server(url, key), as_json=as_json, **kwargs)

    return wrapper


def print_json(answer: object) -> None:
    """For scripts."""
    click.echo(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())


def print_table(title: str, columns: list[str], rows: list[list[object]]) -> None:
    """For people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    console = Console()
    if not console.is_terminal:  # a pipe has no edge to wrap at
        console = Console(width=PIPE_WIDTH)
    console.print(table)
