"""The validator process answers, is ended, and its trouble costs one check only."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from polyloom.adapters.source import AdapterSource
from polyloom.platform.engine.fidelity.client import FidelityValidator
from polyloom.platform.engine.fidelity.errors import (
    FidelityTimeoutError,
    FidelityWorkerError,
    UncheckableError,
)
from polyloom.platform.engine.fidelity.messages import FidelitySettings

SOURCE = AdapterSource(digest="sha256:00", path="/nowhere")


@pytest.fixture
def settings(base_folder: Path) -> FidelitySettings:
    return FidelitySettings(
        model_folder=str(base_folder),
        base_name=base_folder.name,
        base_digest="sha256:00",
        threads=1,
        memory_bytes=1 << 30,
        implementation="reference",
    )


@asynccontextmanager
async def validator(
    settings: FidelitySettings, **options: object
) -> AsyncIterator[FidelityValidator]:
    client = FidelityValidator(settings, **options)
    try:
        yield client
    finally:
        await client.close()


def script(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def gone(client: FidelityValidator) -> None:
    while client.worker_pid is not None:
        await asyncio.sleep(0.01)


async def test_one_worker_answers_check_after_check(
    settings: FidelitySettings, base_folder: Path, train: Callable[..., tuple[Path, str]]
) -> None:
    folder, digest = train(base_folder, r=4, target_modules=["q_proj", "down_proj"])
    source = AdapterSource(digest=digest, path=str(folder))
    async with validator(settings) as client:
        assert client.worker_pid is None
        first = await client.validate(source)
        pid = client.worker_pid
        assert first.passed and first.digest == digest and first.max_effect > 0
        with pytest.raises(UncheckableError, match="the stored files are"):
            await client.validate(AdapterSource(digest="sha256:11", path=str(folder)))
        again = await asyncio.gather(client.validate(source), client.validate(source))
        assert [v.max_logprob_diff for v in again] == [first.max_logprob_diff] * 2
        assert client.worker_pid == pid is not None
    assert client.worker_pid is None
    assert not alive(pid)


async def test_a_worker_that_dies_says_its_last_words(settings: FidelitySettings) -> None:
    dying = script("import sys; sys.stdin.buffer.read(9); sys.exit('out of luck')")
    async with validator(settings, command=dying) as client:
        for _ in range(2):
            with pytest.raises(FidelityWorkerError, match="status 1: out of luck"):
                await client.validate(SOURCE)
            assert client.worker_pid is None


async def test_a_worker_that_cannot_start(settings: FidelitySettings) -> None:
    async with validator(settings, command=("/nonexistent/python",)) as client:
        with pytest.raises(FidelityWorkerError, match="cannot start"):
            await client.validate(SOURCE)


async def test_a_base_that_cannot_be_served(settings: FidelitySettings, tmp_path: Path) -> None:
    elsewhere = msgspec.structs.replace(settings, model_folder=str(tmp_path))
    async with validator(elsewhere) as client:
        with pytest.raises(FidelityWorkerError, match="ended with status 1"):
            await client.validate(SOURCE)


async def test_a_wedged_worker_is_killed(settings: FidelitySettings) -> None:
    async with validator(
        settings, command=script("import time; time.sleep(600)"), timeout=0.3
    ) as c:
        with pytest.raises(FidelityTimeoutError, match=r"sha256:00 within 0\.3 s"):
            await c.validate(SOURCE)
        assert c.worker_pid is None


async def test_a_cancelled_check_takes_its_worker_along(settings: FidelitySettings) -> None:
    async with validator(settings, command=script("import time; time.sleep(600)")) as client:
        task = asyncio.create_task(client.validate(SOURCE))
        while client.worker_pid is None:
            await asyncio.sleep(0.01)
        pid = client.worker_pid
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.worker_pid is None
        assert not alive(pid)


async def test_an_unused_worker_gives_its_memory_back(settings: FidelitySettings) -> None:
    answer = (
        "import sys; from polyloom.platform.engine.fidelity.frames import pack, read_frame;"
        "from polyloom.platform.engine.fidelity.messages import Uncheckable;"
        "read_frame(sys.stdin.buffer)\n"
        "while read_frame(sys.stdin.buffer): sys.stdout.buffer.write(pack(Uncheckable('no')));"
        "sys.stdout.buffer.flush()"
    )
    async with validator(settings, command=script(answer), idle_seconds=0.05) as client:
        for _ in range(2):
            with pytest.raises(UncheckableError, match="no"):
                await client.validate(SOURCE)
            pid = client.worker_pid
            assert pid is not None
            async with asyncio.timeout(10):  # it is let go of first, and ends a moment later
                await gone(client)
                while alive(pid):
                    await asyncio.sleep(0.01)


async def test_a_worker_leaves_with_its_parent(settings: FidelitySettings) -> None:
    """Its input ends when the parent is gone, whatever took the parent."""
    process = await asyncio.create_subprocess_exec(
        *script(
            "import runpy; runpy.run_module('polyloom.platform.engine.fidelity', run_name='__main__')"
        ),
        stdin=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.close()
    async with asyncio.timeout(60):
        assert await process.wait() == 0
