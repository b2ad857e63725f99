"""Renders the templates that tenants ship, in processes that a hostile one may hang or exhaust.

Workers start at their first job and are replaced when a job breaks them. A tenant has one job at
a time, so that its templates cannot hold all workers against the others.
"""

import asyncio
import sys
from contextlib import AsyncExitStack, suppress
from typing import cast

import msgspec

from polyloom.platform.engine.fidelity.frames import LENGTH, pack
from polyloom.platform.errors import EngineUnavailable, QueueFull
from polyloom.platform.generation.template_jobs import (
    RENDER_SECONDS,
    TemplateAnswer,
    TemplateFault,
    TemplateJob,
)
from polyloom.platform.turns import Turns

_COMMAND = (sys.executable, "-m", "polyloom.platform.generation.template_worker")
_START_SECONDS = 30.0


class TemplateWorkers:
    """A few worker processes; their jobs queue fairly among tenants."""

    def __init__(
        self,
        *,
        workers: int = 2,
        render_seconds: float = RENDER_SECONDS,
        wait_seconds: float = 10.0,
        command: tuple[str, ...] = _COMMAND,
    ) -> None:
        """wait_seconds: how long a job waits for its turn."""
        self._wait_seconds = wait_seconds
        self._workers = [_Worker(command, render_seconds) for _ in range(workers)]
        # Last in, first out: a second process starts only when two jobs meet.
        self._free: asyncio.LifoQueue[_Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)
        self._turns = Turns()

    async def run(self, tenant: str, job: TemplateJob) -> str:
        """The rendered text. Raises TemplateFault, QueueFull, EngineUnavailable."""
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._wait_seconds):
                    await held.enter_async_context(self._turns.of(tenant))
                    worker = await self._free.get()
            except TimeoutError:
                message = "too many chat templates wait to be rendered"
                raise QueueFull(message, retry_after=1) from None
            held.callback(self._free.put_nowait, worker)
            answer = await worker.run(job)
        if answer.fault is not None:
            raise TemplateFault(answer.fault)
        return answer.text

    async def close(self) -> None:
        """End the workers; what they are at ends first, and nothing starts after."""
        for _ in self._workers:
            worker = await self._free.get()
            await worker.end()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers that run."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]


class _DiedError(Exception):
    """The process ended before it answered."""


class _Worker:
    """One process at a time, started when a job needs it. One job at a time."""

    def __init__(self, command: tuple[str, ...], render_seconds: float) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self._command = command
        self._render_seconds = render_seconds

    async def run(self, job: TemplateJob) -> TemplateAnswer:
        try:
            return await self._ask(job)
        except _DiedError:
            pass  # of this job, or of something else while it was idle: the second try tells
        try:
            return await self._ask(job)
        except _DiedError:
            raise TemplateFault("the chat template breaks the process that renders it") from None

    async def end(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        cast(asyncio.StreamWriter, process.stdin).close()

    async def _ask(self, job: TemplateJob) -> TemplateAnswer:
        process = self.process if self.process is not None else await self._start()
        try:
            async with asyncio.timeout(self._render_seconds):
                answer = await _exchange(process, job)
        except TimeoutError:
            await self.end()
            message = f"the chat template takes longer than {self._render_seconds:g} s"
            raise TemplateFault(message) from None
        except BaseException:
            await self.end()  # an answer on its way would be taken for the next job's
            raise
        if answer.spent:
            await self.end()
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            self.process = process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the parent, which ends it
            )
            async with asyncio.timeout(_START_SECONDS):
                await _answer(process)
        except (OSError, TimeoutError, _DiedError) as error:
            await self.end()
            message = "this model's chat template cannot be rendered now"
            raise EngineUnavailable(message, retry_after=5) from error
        except BaseException:
            await self.end()
            raise
        return process


async def _exchange(process: asyncio.subprocess.Process, job: TemplateJob) -> TemplateAnswer:
    stdin = cast(asyncio.StreamWriter, process.stdin)
    try:
        stdin.write(pack(job))
        await stdin.drain()
    # uvloop raises RuntimeError where asyncio raises ConnectionError: the pipe is closed.
    except (ConnectionError, RuntimeError) as error:
        raise _DiedError from error
    return await _answer(process)


async def _answer(process: asyncio.subprocess.Process) -> TemplateAnswer:
    stdout = cast(asyncio.StreamReader, process.stdout)
    try:
        (size,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        body = await stdout.readexactly(size)
    except (asyncio.IncompleteReadError, ConnectionError) as error:
        raise _DiedError from error
    return msgspec.msgpack.decode(body, type=TemplateAnswer)
