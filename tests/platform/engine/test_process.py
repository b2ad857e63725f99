"""A real engine process and the real client: loss, restart, aborts, slow and vanished readers."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from polyloom.platform.engine import client as client_module
from polyloom.platform.engine.client import EngineClient
from polyloom.platform.engine.errors import (
    EngineRefusedError,
    EngineStartError,
    EngineUnavailableError,
    SlowReaderError,
)
from polyloom.platform.engine.messages import Events, Finished, Hello, Refused, Tokens
from polyloom.platform.engine.supervisor import EngineState, EngineSupervisor

PROMPT = tuple(range(5, 25))
ENDLESS = 900


@pytest.fixture
def settings(settings_factory, tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")  # short: a socket's path has at most 103 bytes
    return settings_factory(address=f"ipc://{folder}/e.sock", queue_limit=4, max_running=4)


@pytest.fixture
async def engine(settings):
    """(supervisor, client) of a running engine; nothing of it is left afterwards."""
    supervisor = EngineSupervisor(settings)
    client = await supervisor.start()
    process = psutil.Process(supervisor.pid)
    yield supervisor, client
    await supervisor.close(drain_seconds=5)
    assert not process.is_running()
    assert not settings.socket_path.exists()


async def collect(client, request):
    tokens = []
    async with contextlib.aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, Finished):
                return tokens, event
            tokens += event.token_ids


async def until(condition, seconds=10.0):
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.01)


async def is_idle(client):
    snapshot = await client.snapshot()
    status = snapshot.status
    return not snapshot.sequences and status.blocks_free == status.blocks_total


def time_slices(pid):
    """Nanoseconds by thread, (name, id); nothing where the kernel does not tell."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in (task / "sched").read_text().splitlines():
            if line.startswith("se.slice"):
                name = (task / "comm").read_text().strip()
                found[name, int(task.name)] = int(line.split(":")[1])
    return found


async def test_the_sockets_threads_may_interrupt_a_step(engine):
    pid = engine[0].pid
    slices = time_slices(pid)
    carry = [slice_ for (name, _), slice_ in slices.items() if name.startswith("ZMQbg")]
    steps = [slice_ for (_, thread), slice_ in slices.items() if thread == pid]
    assert not slices or max(carry) < min(steps)


async def test_many_streams_at_once_equal_each_alone(engine, request_factory):
    _, client = engine
    assert client.healthy
    assert client.welcome.max_prompt_tokens == client.welcome.max_model_len - 1

    def request(seed):
        return request_factory(PROMPT, seed=seed, temperature=1.0, max_tokens=30)

    together = await asyncio.gather(*(collect(client, request(seed)) for seed in range(4)))
    for seed, (tokens, end) in enumerate(together):
        assert (len(tokens), end.reason) == (30, "length")
        assert (await collect(client, request(seed)))[0] == tokens
    assert client.open_streams == 0
    assert await is_idle(client)


async def test_killed_mid_stream_errors_at_once_and_the_next_request_works(engine, request_factory):
    supervisor, client = engine
    stream = client.generate(request_factory(PROMPT, max_tokens=ENDLESS))
    await anext(stream)
    killed = supervisor.pid
    started = time.monotonic()
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError):
        async for _ in stream:
            pass
    assert time.monotonic() - started < 2
    with pytest.raises(EngineUnavailableError):
        await collect(client, request_factory(PROMPT))

    await client.wait_ready(60)
    tokens, end = await collect(client, request_factory(PROMPT))
    assert (len(tokens), end.reason) == (8, "length")
    assert supervisor.restarts == 1
    assert supervisor.pid != killed

    async def ready():
        return supervisor.state is EngineState.READY

    await until(ready)
    assert "status -9" in supervisor.last_end


async def test_leaving_a_stream_aborts_its_sequence(engine, request_factory):
    _, client = engine
    async with contextlib.aclosing(
        client.generate(request_factory(PROMPT, max_tokens=ENDLESS))
    ) as stream:
        await anext(stream)
        assert not await is_idle(client)
    assert await is_idle(client)

    reader = asyncio.create_task(collect(client, request_factory(PROMPT, max_tokens=ENDLESS)))

    async def runs():
        return not await is_idle(client)

    await until(runs)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)
    assert await is_idle(client)


async def test_an_explicit_abort_ends_the_stream(engine, request_factory):
    _, client = engine
    request = request_factory(PROMPT, max_tokens=ENDLESS)
    stream = client.generate(request)
    await anext(stream)
    await client.abort(request.sequence_id)
    events = [event async for event in stream]
    assert events[-1].reason == "abort"


async def test_refusals_and_deadlines_reach_the_caller(engine, request_factory):
    _, client = engine
    with pytest.raises(EngineRefusedError) as refused:
        await collect(client, request_factory(PROMPT, max_tokens=10_000))
    assert refused.value.code == "context_length_exceeded"
    flood = [collect(client, request_factory(PROMPT, max_tokens=60)) for _ in range(40)]
    results = await asyncio.gather(*flood, return_exceptions=True)
    codes = {r.code for r in results if isinstance(r, EngineRefusedError)}
    assert codes == {"queue_full"}
    assert any(not isinstance(r, Exception) for r in results)
    request = request_factory(PROMPT, max_tokens=ENDLESS, deadline=time.time() + 0.05)
    _, end = await collect(client, request)
    assert end.reason == "deadline"


async def test_a_reader_that_stays_behind_is_ended_and_one_that_catches_up_is_not(
    engine, request_factory, monkeypatch
):
    _, client = engine
    monkeypatch.setattr(client_module, "UNREAD_LIMIT", 50)
    slow = client.generate(request_factory(PROMPT, max_tokens=200))
    await anext(slow)

    async def idle():
        return await is_idle(client)

    await until(idle)
    with pytest.raises(SlowReaderError):
        async for _ in slow:
            pass

    patient = client.generate(request_factory(PROMPT, max_tokens=40))
    await anext(patient)
    await until(idle)
    rest = [event async for event in patient]
    merged = [event for event in rest if isinstance(event, Tokens)]
    assert len(merged) == 1
    assert len(merged[0].token_ids) == 39


async def test_sequences_of_a_client_that_vanishes_are_ended(engine, request_factory, settings):
    _, client = engine
    other = await EngineClient.connect(settings.address)
    stream = other.generate(request_factory(PROMPT, max_tokens=ENDLESS))
    await anext(stream)
    await other.close()
    with pytest.raises(EngineUnavailableError):
        async for _ in stream:
            pass

    async def idle():
        return await is_idle(client)

    await until(idle, 5)


async def test_a_client_of_another_version_is_refused(engine, settings):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 5000)
        socket.connect(settings.address)
        for command in (msgspec.msgpack.encode(Hello(version=99)), b"not a command"):
            socket.send(command)
            (event,) = msgspec.msgpack.decode(socket.recv(), type=Events).events
            assert isinstance(event, Refused)
            assert event.code == "invalid_request"


async def test_termination_drains(settings, request_factory):
    supervisor = EngineSupervisor(settings)
    client = await supervisor.start()
    stream = client.generate(request_factory(PROMPT, max_tokens=100))
    first = await anext(stream)
    closing = asyncio.create_task(supervisor.close(drain_seconds=60))
    events = [event async for event in stream]
    assert events[-1].reason == "length"
    total = len(first.token_ids) + sum(len(e.token_ids) for e in events[:-1])
    assert total == 100
    await closing
    assert supervisor.state is EngineState.STOPPED


async def test_a_start_that_cannot_work_says_why_and_leaves_nothing(settings):
    broken = msgspec.structs.replace(settings, kv_memory=10)
    supervisor = EngineSupervisor(broken)
    with pytest.raises(EngineStartError, match="kv_memory of 10 bytes"):
        await supervisor.start()
    assert supervisor.pid is None
    assert not settings.socket_path.exists()


async def test_a_crash_loop_becomes_visible(settings, monkeypatch):
    supervisor = EngineSupervisor(settings)
    client = await supervisor.start()
    supervisor.settings = msgspec.structs.replace(settings, kv_memory=10)
    os.kill(supervisor.pid, signal.SIGKILL)

    async def failing():
        return supervisor.state is EngineState.FAILING

    await until(failing, 120)
    assert not client.healthy
    assert "kv_memory of 10 bytes" in supervisor.last_end
    await supervisor.close()


def test_an_engine_does_not_outlive_its_parent(settings, tmp_path: Path):
    """The parent is killed without a chance to clean up."""
    script = (
        "import subprocess, sys\n"
        "engine = subprocess.Popen([sys.executable, '-m', 'polyloom.platform.engine.process'],"
        " stdin=subprocess.PIPE, stderr=sys.stderr)\n"
        "engine.stdin.write(sys.argv[1].encode()); engine.stdin.close()\n"
        "print(engine.pid, flush=True); engine.wait()\n"
    )
    log = (tmp_path / "log").open("w+")
    parent = subprocess.Popen(
        [sys.executable, "-c", script, msgspec.json.encode(settings).decode()],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
    )
    engine = psutil.Process(int(parent.stdout.readline()))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, 60_000)
        socket.connect(settings.address)
        socket.send(msgspec.msgpack.encode(Hello()))
        socket.recv()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    log.close()
    engine.wait(10)
    assert not settings.socket_path.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_budget": 0}, "token_budget"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"address": "tcp://127.0.0.1:1"}, "ipc"),
        ({"address": "ipc:///" + "x" * 120}, "103"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_by_name(settings, change, message):
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(settings, **change)
