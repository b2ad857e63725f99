"""A Polyloom server of one's own: a free port, a temporary data directory, nothing left behind."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

START_SECONDS = 600.0  # the first start downloads and converts the base and compiles the CPU ops
STOP_SECONDS = 60.0


class ServerStartError(RuntimeError):
    """The server ended, or did not become healthy in time; the message ends with its last lines."""


@dataclass(frozen=True)
class LocalServer:
    """A running server and the key that administers it."""

    url: str
    admin_key: str
    data_dir: Path
    log: Path
    pid: int

    def admin(self) -> httpx.AsyncClient:
        """A client with the admin key; the caller closes it."""
        headers = {"authorization": f"Bearer {self.admin_key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=600)

    async def create_tenant(self, slug: str, scopes: Sequence[str]) -> str:
        """A tenant and one key with `scopes`; returns the key."""
        async with self.admin() as admin:
            (await admin.post("/admin/tenants", json={"slug": slug})).raise_for_status()
            body = {"scopes": list(scopes)}
            answer = await admin.post(f"/admin/tenants/{slug}/keys", json=body)
            answer.raise_for_status()
            key: str = answer.json()["key"]
            return key


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def local_server(base: str, options: Sequence[str] = ()) -> AsyncIterator[LocalServer]:
    """Run `polyloom serve` for the time of the block.

    Raises:
        ServerStartError: it did not become healthy.
    """
    with tempfile.TemporaryDirectory(prefix="polyloom-") as folder:
        data_dir, log = Path(folder) / "data", Path(folder) / "server.log"
        port, admin_key = free_port(), secrets.token_urlsafe(32)
        command = [sys.executable, "-m", "polyloom.platform.cli.main", "serve", "--base", base]
        command += ["--port", str(port), "--data-dir", str(data_dir), *options]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdout=output,
                stderr=output,
                env={**os.environ, "POLYLOOM_ADMIN_KEY": admin_key},
            )
        server = LocalServer(f"http://127.0.0.1:{port}", admin_key, data_dir, log, process.pid)
        try:
            await _healthy(server, process)
            yield server
        finally:
            await _stop(process)


async def _healthy(server: LocalServer, process: asyncio.subprocess.Process) -> None:
    give_up = time.monotonic() + START_SECONDS
    async with httpx.AsyncClient(base_url=server.url, timeout=5) as client:
        while time.monotonic() < give_up:
            if process.returncode is not None:
                raise ServerStartError(f"the server ended:\n{_last_lines(server.log)}")
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/health")).status_code == httpx.codes.OK:
                    return
            await asyncio.sleep(0.2)
    raise ServerStartError(f"not healthy after {START_SECONDS:.0f} s:\n{_last_lines(server.log)}")


def _last_lines(log: Path, count: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-count:])


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
