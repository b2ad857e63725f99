"""The validator process, from the process that owns it.

The worker starts at the first check, stays warm for a while, and is then ended, which gives its
memory back. One check runs at a time. Whatever goes wrong with it costs that check, not the next.
"""

import asyncio
import sys
import tempfile
from contextlib import suppress
from typing import BinaryIO, cast

import msgspec

from polyloom.adapters.source import AdapterSource
from polyloom.platform.engine.fidelity.errors import (
    FidelityTimeoutError,
    FidelityWorkerError,
    UncheckableError,
)
from polyloom.platform.engine.fidelity.frames import LENGTH, pack
from polyloom.platform.engine.fidelity.messages import (
    Answer,
    Check,
    FidelitySettings,
    Uncheckable,
    Verdict,
)

_WORKER = (sys.executable, "-m", "polyloom.platform.engine.fidelity")
_TAIL_BYTES = 2_000


class FidelityValidator:
    """Asks one worker at a time; starts, restarts and ends it as needed."""

    def __init__(
        self,
        settings: FidelitySettings,
        *,
        timeout: float = 900.0,
        idle_seconds: float = 120.0,
        command: tuple[str, ...] = _WORKER,
    ) -> None:
        """timeout: seconds for a check, a start of the worker included.  idle_seconds: how long an
        unused worker stays."""
        self._settings = settings
        self._timeout = timeout
        self._idle_seconds = idle_seconds
        self._command = command
        self._turn = asyncio.Lock()
        self._worker: _Worker | None = None
        self._retirement: asyncio.Task[None] | None = None

    async def validate(self, source: AdapterSource) -> Verdict:
        """The verdict on a revision's folder.

        Raises UncheckableError when either side refuses the adapter, FidelityTimeoutError and
        FidelityWorkerError when nothing could be said.
        """
        async with self._turn:
            self._keep()
            try:
                async with asyncio.timeout(self._timeout):
                    answer = await self._ask(Check(source.path, source.digest))
            except TimeoutError:
                await self._end()
                message = f"no verdict on {source.digest} within {self._timeout:g} s"
                raise FidelityTimeoutError(message) from None
            except BaseException:
                # An answer may still be on its way: nobody may take it for the next check's.
                await self._end()
                raise
            self._retirement = asyncio.create_task(self._retire_when_idle())
        if isinstance(answer, Uncheckable):
            raise UncheckableError(answer.message)
        return answer

    async def close(self) -> None:
        """End the worker; a check under way ends first."""
        async with self._turn:
            self._keep()
            await self._end()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, None while there is none."""
        return None if self._worker is None else self._worker.pid

    async def _ask(self, check: Check) -> Answer:
        if self._worker is None:
            self._worker = await _Worker.start(self._command, self._settings)
        return await self._worker.ask(check)

    async def _retire_when_idle(self) -> None:
        await asyncio.sleep(self._idle_seconds)
        async with self._turn:
            await self._end()

    def _keep(self) -> None:
        if self._retirement is not None and self._retirement is not asyncio.current_task():
            self._retirement.cancel()
            self._retirement = None

    async def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.kill()


class _Worker:
    """One running worker process."""

    def __init__(self, process: asyncio.subprocess.Process, stderr: BinaryIO) -> None:
        self._process = process
        self._stderr = stderr
        self._input = cast(asyncio.StreamWriter, process.stdin)
        self._output = cast(asyncio.StreamReader, process.stdout)

    @classmethod
    async def start(cls, command: tuple[str, ...], settings: FidelitySettings) -> "_Worker":
        stderr = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - closed by `kill`
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
            )
        except OSError as error:
            stderr.close()
            raise FidelityWorkerError(f"the validator cannot start: {error}") from error
        worker = cls(process, stderr)
        worker._input.write(pack(settings))
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, check: Check) -> Answer:
        try:
            self._input.write(pack(check))
            await self._input.drain()
            (size,) = LENGTH.unpack(await self._output.readexactly(LENGTH.size))
            body = await self._output.readexactly(size)
        # uvloop raises RuntimeError where asyncio raises ConnectionError: the pipe is closed.
        except (asyncio.IncompleteReadError, ConnectionError, RuntimeError) as error:
            status = await self._process.wait()
            raise FidelityWorkerError(
                f"the validator ended with status {status}: {self._last_words()}"
            ) from error
        return msgspec.msgpack.decode(body, type=Answer)

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._input.close()
        self._stderr.close()

    def _last_words(self) -> str:
        size = self._stderr.seek(0, 2)
        self._stderr.seek(max(0, size - _TAIL_BYTES))
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
