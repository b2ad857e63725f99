"""A stream has the right status, keeps quiet clients, notices those that left."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from polyloom.platform.api import streaming
from polyloom.platform.api.disconnect import ClientGone, until_disconnect
from polyloom.platform.api.streaming import ASGIEventStream
from polyloom.platform.errors import EngineUnavailable, QueueFull


class Client:
    """The far end of a connection: what it was sent, and when it leaves."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.changed = asyncio.Event()

    async def receive(self) -> Any:
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.changed.set()

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)

    async def wait_for(self, text: bytes) -> None:
        while text not in self.body:
            self.changed.clear()
            await self.changed.wait()


class Source:
    """Events given one by one; knows whether it was closed."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.closed = False

    async def stream(self) -> AsyncGenerator[bytes, None]:
        try:
            while (event := await self.events.get()) is not None:
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            self.closed = True


def answer(source: Source, client: Client, limit: float = 60.0) -> asyncio.Task[None]:
    stream = ASGIEventStream(source.stream(), {"x-test": "1"}, limit)
    scope: Any = {"type": "http"}
    return asyncio.create_task(stream(scope, client.receive, client.send))


async def test_events_then_done() -> None:
    source, client = Source(), Client()
    for event in (b"data: 1\n\n", b"data: 2\n\n", None):
        source.events.put_nowait(event)
    await answer(source, client)
    assert client.sent[0]["status"] == 200
    assert (b"x-test", b"1") in client.sent[0]["headers"]
    assert client.body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert client.sent[-1]["more_body"] is False
    assert source.closed


async def test_an_error_before_the_first_event_has_its_own_status() -> None:
    source, client = Source(), Client()
    source.events.put_nowait(QueueFull("full"))
    with pytest.raises(QueueFull):
        await answer(source, client)
    assert client.sent == []
    assert source.closed


async def test_a_later_error_is_an_event() -> None:
    source, client = Source(), Client()
    source.events.put_nowait(b"data: 1\n\n")
    source.events.put_nowait(EngineUnavailable("lost"))
    await answer(source, client)
    assert b'"code":"engine_unavailable"' in client.body
    assert client.body.endswith(b"data: [DONE]\n\n")


async def test_a_queued_client_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "HEAD_PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.01)
    source, client = Source(), Client()
    task = answer(source, client)
    await client.wait_for(b": keep-alive\n\n: keep-alive\n\n")
    source.events.put_nowait(b"data: 1\n\n")
    source.events.put_nowait(None)
    await task
    assert client.body.endswith(b"data: 1\n\ndata: [DONE]\n\n")


async def test_a_client_that_left_closes_the_events() -> None:
    source, client = Source(), Client()
    task = answer(source, client)
    source.events.put_nowait(b"data: 1\n\n")
    await client.wait_for(b"data: 1")
    client.left.set()
    await task
    assert source.closed


async def test_a_reader_that_hangs_is_cut_off() -> None:
    source, client = Source(), Client()
    source.events.put_nowait(b"data: 1\n\n")

    async def hang(_: Any) -> None:
        await asyncio.Event().wait()

    client.send = hang  # type: ignore[method-assign]
    await answer(source, client, limit=0.05)
    assert source.closed


async def test_work_nobody_waits_for_is_cancelled() -> None:
    client, ended = Client(), asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    running = asyncio.ensure_future(work())
    waiting = asyncio.create_task(until_disconnect(client.receive, running))
    await asyncio.sleep(0)
    client.left.set()
    with pytest.raises(ClientGone):
        await waiting
    assert ended.is_set()
