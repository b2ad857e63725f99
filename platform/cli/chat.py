"""`polyloom chat`: talk to a model of a running server."""

from typing import Any

import msgspec
import rich_click as click

from polyloom.platform.cli.client import (
    Server,
    print_json,
    raise_for_error,
    server_options,
    unreachable,
)

Messages = list[dict[str, str]]


@click.command()
@click.argument("model")
@click.option("--message", "-m", help="Say this, print the answer, leave.")
@click.option("--system", help="A system message to begin with.")
@click.option("--max-tokens", type=int, default=512, show_default=True)
@click.option("--temperature", type=float, default=0.7, show_default=True)
@server_options
def chat(
    server: Server,
    as_json: bool,
    model: str,
    message: str | None,
    system: str | None,
    max_tokens: int,
    temperature: float,
) -> None:
    """Talk to MODEL: a base, an adapter, `adapter@3`, `adapter@alias`. Ctrl-D leaves."""
    options = {"model": model, "max_tokens": max_tokens, "temperature": temperature}
    messages: Messages = [{"role": "system", "content": system}] if system else []
    if as_json and message is None:
        raise click.UsageError("--json needs --message")
    if as_json:
        body = options | {"messages": [*messages, {"role": "user", "content": message}]}
        print_json(server.call("POST", "/v1/chat/completions", json=body))
        return
    if message is not None:
        _turn(server, options, messages, message)
        return
    while (said := _ask()) is not None:
        _turn(server, options, messages, said)


def _ask() -> str | None:
    try:
        said: str = click.prompt("you", prompt_suffix="> ")
    except click.Abort:
        click.echo()
        return None
    return said


def _turn(server: Server, options: dict[str, Any], messages: Messages, said: str) -> None:
    """One question and its answer, shown as it comes and added to the conversation."""
    import httpx

    messages.append({"role": "user", "content": said})
    body = options | {"messages": messages, "stream": True}
    answer = ""
    try:
        with (
            server.connect() as client,
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            raise_for_error(response)
            click.secho(f"{response.headers['x-polyloom-revision']}> ", nl=False, bold=True)
            for line in response.iter_lines():
                answer += _show(line)
    except httpx.TransportError as error:
        raise unreachable(server.url, error) from error
    click.echo()
    messages.append({"role": "assistant", "content": answer})


def _show(line: str) -> str:
    """Print the text of one line of the stream."""
    data = line.removeprefix("data: ")
    if data == line or data == "[DONE]":
        return ""
    event = msgspec.json.decode(data)
    if "error" in event:
        raise click.ClickException(event["error"]["message"])
    text: str = "".join(c["delta"].get("content", "") for c in event["choices"])
    click.echo(text, nl=False)
    return text
