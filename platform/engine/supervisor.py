"""Starts the engine process, notices its end, starts it again, and takes it down in the end."""

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections import deque
from enum import StrEnum

import msgspec

from polyloom.platform.engine.client import EngineClient
from polyloom.platform.engine.errors import EngineStartError, EngineUnavailableError
from polyloom.platform.engine.settings import EngineSettings

logger = logging.getLogger("polyloom.engine.supervisor")

START_SECONDS = 600.0  # a large base from a slow disk
STEADY_SECONDS = 60.0  # up for so long, an engine starts with a clean record
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 30.0
FAILING_AFTER = 3  # ends in a row
HUNG_SECONDS = 60.0  # without a heartbeat
WATCH_SECONDS = 1.0


class EngineState(StrEnum):
    """What `/health` says of the engine.

    FAILING: it has ended several times in a row; restarts go on, ever less often.
    """

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILING = "failing"
    STOPPED = "stopped"


class EngineSupervisor:
    """One engine process at a time. Made by `start`, ended by `close`."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.state = EngineState.STARTING
        self.restarts = 0
        self.last_end: str | None = None
        self._ends_in_a_row = 0
        self._process: asyncio.subprocess.Process | None = None
        self._client: EngineClient | None = None
        self._last_lines: deque[str] = deque(maxlen=20)
        self._output: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the running process; None between two."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def start(self) -> EngineClient:
        """Start the process and wait until it answers; the client stays valid over restarts.

        Raises:
            EngineStartError: the process ended, or did not answer in time; nothing is left.
        """
        self._client = EngineClient(self.settings.address)
        try:
            await self._launch()
            await self._wait_ready(self._client)
        except BaseException:
            await self.close(drain_seconds=0)
            raise
        self.state = EngineState.READY
        self._watch = asyncio.create_task(self._keep_running(), name="engine-supervisor")
        return self._client

    async def close(self, drain_seconds: float = 30.0) -> None:
        """Let running sequences finish for `drain_seconds`, then end the process for good."""
        self.state = EngineState.STOPPED
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        process = self._process
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(max(drain_seconds, 0.01)):
                    await process.wait()
            except TimeoutError:
                await self._kill(process)
        if self._output is not None:
            await self._output
        if self._client is not None:
            await self._client.close()
        self.settings.socket_path.unlink(missing_ok=True)

    async def _launch(self) -> None:
        self._last_lines.clear()
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "polyloom.platform.engine.process",
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | _thread_environment(self.settings.threads),
        )
        self._output = asyncio.create_task(self._forward_output(process))
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(msgspec.json.encode(self.settings))
            await process.stdin.drain()
            process.stdin.close()

    async def _wait_ready(self, client: EngineClient) -> None:
        """Until the engine answers or its process ends, whichever is first."""
        assert self._process is not None
        ready = asyncio.create_task(client.wait_ready(START_SECONDS))
        ended = asyncio.create_task(self._process.wait())
        try:
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                raise EngineStartError(await self._describe_end())
            ready.result()
        except EngineUnavailableError as error:
            raise EngineStartError(str(error)) from error
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)

    async def _keep_running(self) -> None:
        """Restart the process whenever it ends."""
        while True:
            started = time.monotonic()
            await self._until_end()
            if time.monotonic() - started > STEADY_SECONDS:
                self._ends_in_a_row = 0
            await self._count_end()
            while not await self._restarted():
                await self._count_end()

    async def _count_end(self) -> None:
        self.last_end = await self._describe_end()
        self._ends_in_a_row += 1
        failing = self._ends_in_a_row >= FAILING_AFTER
        self.state = EngineState.FAILING if failing else EngineState.RESTARTING
        logger.error("%s; end %d in a row", self.last_end, self._ends_in_a_row)

    async def _restarted(self) -> bool:
        """Start it again after a pause that grows; whether it answers."""
        await asyncio.sleep(min(LAST_BACKOFF, FIRST_BACKOFF * 2 ** (self._ends_in_a_row - 1)))
        assert self._client is not None
        self.restarts += 1
        await self._launch()
        try:
            await self._wait_ready(self._client)
        except EngineStartError as error:
            logger.error("the engine did not start: %s", error)
            await self._kill(self._process)
            return False
        self.state = EngineState.READY
        return True

    async def _until_end(self) -> None:
        """Wait for the process to end; one whose step loop has stood still is ended."""
        assert self._process is not None and self._client is not None
        while True:
            try:
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._process.wait()
                return
            except TimeoutError:
                if HUNG_SECONDS < self._client.status_age < float("inf"):
                    logger.error("no heartbeat for %.0f s", self._client.status_age)
                    await self._kill(self._process)

    async def _kill(self, process: asyncio.subprocess.Process | None) -> None:
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _describe_end(self) -> str:
        if self._output is not None:
            await self._output
        code = None if self._process is None else self._process.returncode
        last = self._last_lines[-1] if self._last_lines else "it said nothing"
        return f"the engine process ended with status {code}: {last}"

    async def _forward_output(self, process: asyncio.subprocess.Process) -> None:
        """Pass the engine's log on, and keep its last lines for the report of its end."""
        assert process.stderr is not None
        while line := await _line(process.stderr):
            text = line.decode(errors="replace").rstrip()
            self._last_lines.append(text)
            print(text, file=sys.stderr, flush=True)


async def _line(stream: asyncio.StreamReader) -> bytes:
    """The next line; one too long to keep is dropped."""
    while True:
        with contextlib.suppress(ValueError):
            return await stream.readline()


def _thread_environment(threads: int) -> dict[str, str]:
    """What OpenMP reads before torch can be told."""
    return {"OMP_NUM_THREADS": str(threads)}
