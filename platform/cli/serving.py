"""Runs the server in this process until a signal ends it."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import rich_click as click
import uvicorn
import uvloop

from polyloom.platform.app import build_app
from polyloom.platform.assembly import Assembly
from polyloom.platform.cli.pulling import pull_with_progress
from polyloom.platform.engine.errors import EngineError
from polyloom.platform.engine.model.errors import ModelError
from polyloom.platform.errors import PlatformError
from polyloom.platform.generation.tokenizers import TokenizerUnusable
from polyloom.platform.settings import Settings, SettingsError

GRACE_SECONDS = 30
"""How long running requests may go on once the server has been told to stop."""

START_ERRORS = (EngineError, ModelError, PlatformError, SettingsError, TokenizerUnusable, OSError)


class Server(uvicorn.Server):
    """Leaves signals to `run_server`, which has more to end than this."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: the loop's own handlers set `should_exit`."""
        yield


def run_server(settings: Settings) -> None:
    """Fetch the base, start everything, serve, and end everything in order."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        with _bound_socket(settings.host, settings.port) as listener:
            pull_with_progress(settings.base, settings.data_dir)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_serve(settings, listener))
    except START_ERRORS as error:
        raise click.ClickException(str(error)) from error
    except asyncio.CancelledError:
        raise click.ClickException("told to stop before the start was over") from None


def _bound_socket(host: str, port: int) -> socket.socket:
    """Taken before the long work, so that a port in use is known at once. Nobody can connect yet."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


async def _serve(settings: Settings, listener: socket.socket) -> None:
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, this.cancel)
    async with Assembly(settings).running() as assembly:
        config = uvicorn.Config(
            build_app(assembly),
            http="httptools",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        server = Server(config)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        _announce(assembly, listener)
        await server.serve(sockets=[listener])


def _announce(assembly: Assembly, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    click.echo(f"Polyloom serves {assembly.base.name} at http://{host}:{port}")
    click.echo(
        f"OpenAI clients: base_url http://{host}:{port}/v1, model {assembly.base.name}, and a key "
        "from `polyloom keys create` (API: /schema/openapi.json)"
    )
    if assembly.admin_key_file is not None:
        click.echo(f"The admin key is in {assembly.admin_key_file}")
