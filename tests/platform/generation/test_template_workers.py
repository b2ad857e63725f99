"""A template that hangs, eats or breaks its worker costs its own request, and no one else's."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator

import pytest

from polyloom.platform.errors import EngineUnavailable, QueueFull
from polyloom.platform.generation.template_jobs import TemplateFault, TemplateJob
from polyloom.platform.generation.template_workers import TemplateWorkers

MESSAGES = [{"role": "user", "content": "Hi"}]
LOOP = "{% for i in range(99999) %}" * 2 + "{% endfor %}" * 2
FOLDED = "{{ 7 ** (10 ** 8) % 3 }}"
"""Jinja computes this while it compiles; no signal handler of Python's would interrupt it."""


def job(template: str) -> TemplateJob:
    return TemplateJob(template, MESSAGES)


GOOD = job("{{ messages[0].content }}")


@pytest.fixture
async def workers() -> AsyncIterator[TemplateWorkers]:
    workers = TemplateWorkers()
    yield workers
    pids = workers.pids
    await workers.close()
    assert workers.pids == []
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def fault(workers: TemplateWorkers, job: TemplateJob) -> str:
    with pytest.raises(TemplateFault) as raised:
        await workers.run("hostile", job)
    return str(raised.value)


async def test_nothing_runs_before_the_first_job(workers: TemplateWorkers) -> None:
    assert workers.pids == []
    assert await workers.run("t", GOOD) == "Hi"
    (pid,) = workers.pids
    assert await workers.run("u", GOOD) == "Hi"
    assert workers.pids == [pid]


@pytest.mark.parametrize("hanging", [job(LOOP), job(FOLDED), TemplateJob(FOLDED)])
async def test_a_template_that_hangs(workers: TemplateWorkers, hanging: TemplateJob) -> None:
    await workers.run("t", GOOD)
    pids, started = workers.pids, time.monotonic()
    assert await fault(workers, hanging) == "the chat template takes longer than 2 s"
    assert time.monotonic() - started < 4
    assert not any(map(alive, pids))
    assert await workers.run("hostile", GOOD) == "Hi"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 'x' * 10 ** 9 }}", "needs more than 512 MiB of memory"),
        (
            "{% set n = namespace(a='x') %}{% for i in range(99) %}{% set n.a = n.a * 2 %}{% endfor %}",
            "needs more than 512 MiB of memory",
        ),
        ("{{ ('x' * 1000) | center(20000000) }}", "writes more than 16 MiB of text"),
        ("{% for i in range(99999) %}{{ 'x' * 300 }}{% endfor %}", "writes more than 16 MiB"),
        (r"{{ '\ud800' }}", "UnicodeEncodeError"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
    ],
)
async def test_a_template_over_a_limit(workers: TemplateWorkers, template: str, said: str) -> None:
    assert said in await fault(workers, job(template))
    assert await workers.run("hostile", GOOD) == "Hi"


async def test_a_hanging_tenant_delays_no_other(workers: TemplateWorkers) -> None:
    hostile = [asyncio.create_task(fault(workers, job(LOOP))) for _ in range(3)]
    await asyncio.sleep(0)
    assert await asyncio.gather(*(workers.run(f"t{i}", GOOD) for i in range(20))) == ["Hi"] * 20
    assert not any(task.done() for task in hostile[1:])
    assert len(set(await asyncio.gather(*hostile))) == 1


async def test_the_wait_is_bounded() -> None:
    workers = TemplateWorkers(workers=1, wait_seconds=0.5)
    await workers.run("t", GOOD)
    hanging = asyncio.create_task(fault(workers, job(LOOP)))
    await asyncio.sleep(0)
    for tenant in ("hostile", "other"):
        with pytest.raises(QueueFull, match="chat templates"):
            await workers.run(tenant, GOOD)
    await hanging
    assert await workers.run("other", GOOD) == "Hi"
    await workers.close()


async def test_a_worker_killed_from_outside(workers: TemplateWorkers) -> None:
    """Idle or at work, it is the template's fault only when it happens again."""
    await workers.run("t", GOOD)
    (idle,) = workers.pids
    os.kill(idle, signal.SIGKILL)
    assert await workers.run("t", GOOD) == "Hi"
    (busy,) = workers.pids
    assert busy != idle
    hanging = asyncio.create_task(fault(workers, job(LOOP)))
    await asyncio.sleep(0)
    os.kill(busy, signal.SIGKILL)
    assert "longer than" in await hanging
    assert await workers.run("t", GOOD) == "Hi"


async def test_a_template_that_breaks_its_worker_each_time() -> None:
    breaking = (
        "import sys; from polyloom.platform.engine.fidelity.frames import pack, read_frame;"
        "from polyloom.platform.generation.template_jobs import TemplateAnswer;"
        "sys.stdout.buffer.write(pack(TemplateAnswer())); sys.stdout.flush();"
        "read_frame(sys.stdin.buffer)"
    )
    workers = TemplateWorkers(command=(sys.executable, "-c", breaking))
    assert "breaks the process" in await fault(workers, GOOD)
    assert workers.pids == []
    await workers.close()


async def test_a_worker_that_cannot_start() -> None:
    for command in (("/nonexistent/python",), (sys.executable, "-c", "")):
        workers = TemplateWorkers(command=command)
        with pytest.raises(EngineUnavailable):
            await workers.run("t", GOOD)
        await workers.close()


async def test_a_cancelled_job_takes_its_worker_along(workers: TemplateWorkers) -> None:
    await workers.run("t", GOOD)
    (pid,) = workers.pids
    hanging = asyncio.create_task(workers.run("t", job(LOOP)))
    await asyncio.sleep(0.05)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert not alive(pid)
    assert await workers.run("t", GOOD) == "Hi"


@pytest.mark.parametrize("template", ["idle", LOOP, FOLDED])
async def test_a_worker_leaves_with_its_parent(template: str) -> None:
    """Whatever took the parent, and whatever the worker is at."""
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, template, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.kill()
    await parent.wait()
    async with asyncio.timeout(20):
        while running(pid):
            await asyncio.sleep(0.05)


PARENT = """
import asyncio, sys
from polyloom.platform.generation.template_jobs import TemplateJob
from polyloom.platform.generation.template_workers import TemplateWorkers

async def main():
    workers = TemplateWorkers(render_seconds=600)
    await workers.run("t", TemplateJob("ready", [{"role": "user", "content": ""}]))
    if sys.argv[1] != "idle":
        asyncio.create_task(workers.run("t", TemplateJob(sys.argv[1], [{"role": "u"}])))
        await asyncio.sleep(0.1)
    print(*workers.pids, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def running(pid: int) -> bool:
    """A zombie that nobody reaps here has ended."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
