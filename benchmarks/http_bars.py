"""The bars that only the whole server can show: what HTTP adds, idle streams, a killed engine."""

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from benchmarks.processes import engine_process
from examples.local_server import LocalServer

OVERHEAD_REQUESTS = 60
IDLE_STREAMS = 500
WINDOW_SECONDS = 6.0
IDLE_WINDOW_SECONDS = 15.0  # a whole round of keep-alives
WINDOWS = 3


@dataclass(frozen=True)
class IdleStreams:
    """Step time with the idle streams over that without, and what was left of them."""

    ratio: float
    left_waiting: int


@dataclass(frozen=True)
class KilledEngine:
    """Seconds until every client had its error, and until the next request was answered."""

    error_after: float
    errors: int
    streams: int
    answered_after: float


def tenant_client(server: LocalServer, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=server.url, headers=headers, timeout=600, limits=limits)


def body(model: str, tokens: int, **more: Any) -> dict[str, Any]:
    """A prompt that is answered in words: half of a character would rightly wait for the rest."""
    prompt = "The quick brown fox jumps over the lazy dog and then it meets"
    base = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    return base | {"stream": True, "temperature": 0} | more


async def events(
    client: httpx.AsyncClient, body: Mapping[str, Any], opened: Callable[[], None] = lambda: None
) -> AsyncIterator[str]:
    """The data lines of a streamed completion, as they come. Raises on an HTTP error.

    opened: called when the status line is there.
    """
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        opened()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


async def api_overhead(server: LocalServer, client: httpx.AsyncClient, model: str) -> float:
    """Median over requests, one at a time, of TTFT at the client less TTFT in the engine, in s.

    The client's time begins when it has sent the whole body.
    """
    seen: dict[str, float] = {}
    sent = 0.0

    async def note(event: str, _: Mapping[str, Any]) -> None:
        nonlocal sent
        if event == "http11.send_request_body.complete":
            sent = time.perf_counter()

    asked, extensions = body(model, 4), {"trace": note}
    for _ in range(OVERHEAD_REQUESTS):
        stream = client.stream("POST", "/v1/completions", json=asked, extensions=extensions)
        async with stream as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    seen.setdefault(answer.headers["x-request-id"], time.perf_counter() - sent)
    rows = await _usage_rows(server, set(seen))
    return statistics.median(seen[name] - ttft for name, ttft in rows.items())


async def _usage_rows(server: LocalServer, wanted: set[str]) -> dict[str, float]:
    """Engine's TTFT by request id, once the record has them all."""
    async with server.admin() as admin:
        while True:
            answer = await admin.get("/admin/usage/requests", params={"limit": 500})
            answer.raise_for_status()
            rows = {row["request_id"]: row["ttft"] for row in answer.json()["data"]}
            if wanted <= rows.keys():
                return {name: rows[name] for name in wanted}
            await asyncio.sleep(0.2)


async def _status(server: LocalServer) -> dict[str, Any]:
    async with server.admin() as admin:
        answer = await admin.get("/admin/engine")
        answer.raise_for_status()
        status: dict[str, Any] = answer.json()["status"]
        return status


async def _step_seconds(server: LocalServer, window: float) -> float:
    """Mean time of a step over `window` seconds."""
    before = await _status(server)
    await asyncio.sleep(window)
    after = await _status(server)
    spent = after["step_seconds_total"] - before["step_seconds_total"]
    return float(spent / (after["steps"] - before["steps"]))


async def idle_streams(server: LocalServer, client: httpx.AsyncClient, model: str) -> IdleStreams:
    """A server that runs two sequences at a time: two busy streams, then 500 that only wait.

    The busy contexts grow and so do their steps: each window with the idle streams is compared
    with the mean of those before and after it.
    """
    busy = [asyncio.create_task(_read_all(client, body(model, 8000))) for _ in range(2)]
    while (await _status(server))["running"] < 2:
        await asyncio.sleep(0.1)
    without, with_them, left = [await _step_seconds(server, WINDOW_SECONDS)], [], 0
    for _ in range(WINDOWS):
        idle = await _open_idle(client, model)
        with_them.append(await _step_seconds(server, IDLE_WINDOW_SECONDS))
        if any(task.done() for task in (*busy, *idle)):
            raise RuntimeError("a stream ended before all windows were measured")
        for task in idle:
            task.cancel()
        await asyncio.gather(*idle, return_exceptions=True)
        left = await _left_waiting(server)
        without.append(await _step_seconds(server, WINDOW_SECONDS))
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    between = [(before + after) / 2 for before, after in itertools.pairwise(without)]
    ratios = [found / beside for found, beside in zip(with_them, between, strict=True)]
    return IdleStreams(statistics.median(ratios), left)


async def _open_idle(client: httpx.AsyncClient, model: str) -> list[asyncio.Task[list[str]]]:
    """Streams that wait in the engine's queue; each has its status line on return."""
    opened = asyncio.Semaphore(0)
    streams = [
        asyncio.create_task(_read_all(client, body(model, 8), opened.release))
        for _ in range(IDLE_STREAMS)
    ]
    for _ in streams:
        await opened.acquire()
    return streams


async def _left_waiting(server: LocalServer) -> int:
    """What still waits two seconds after all clients have gone."""
    give_up = time.monotonic() + 2
    while (left := (await _status(server))["waiting"]) and time.monotonic() < give_up:
        await asyncio.sleep(0.1)
    return int(left)


async def _read_all(
    client: httpx.AsyncClient, body: Mapping[str, Any], opened: Callable[[], None] = lambda: None
) -> list[str]:
    async with aclosing(events(client, body, opened)) as lines:  # type: ignore[type-var]
        return [line async for line in lines]


async def killed_engine(server: LocalServer, client: httpx.AsyncClient, model: str) -> KilledEngine:
    """Kill the engine under four streams; every one must say so, and the next request must work."""
    started = [asyncio.Event() for _ in range(4)]
    streams = [
        asyncio.create_task(_until_error(client, body(model, 4000), event)) for event in started
    ]
    await asyncio.gather(*(event.wait() for event in started))
    engine_process(server.pid).kill()
    killed = time.perf_counter()
    ends = await asyncio.gather(*streams)
    while True:
        answer = await client.post("/v1/completions", json=body(model, 2, stream=False))
        if answer.status_code == httpx.codes.OK:
            break
        answer.read()
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
            raise RuntimeError(f"while the engine is away: {answer.status_code} {answer.text}")
        await asyncio.sleep(0.1)
    return KilledEngine(
        error_after=max(at for at, _ in ends) - killed,
        errors=sum(code == "engine_unavailable" for _, code in ends),
        streams=len(ends),
        answered_after=time.perf_counter() - killed,
    )


async def _until_error(
    client: httpx.AsyncClient, body: Mapping[str, Any], started: asyncio.Event
) -> tuple[float, str | None]:
    """When the stream ended, and the code of its error event."""
    code = None
    async for line in events(client, body):
        started.set()
        if line != "[DONE]" and (error := msgspec.json.decode(line).get("error")):
            code = error["code"]
    return time.perf_counter(), code
