"""A soak of the whole server: thousands of short requests, some cancelled, some bad, adapters pushed
and retired meanwhile; at the end everything is accounted for.

    python -m benchmarks.soak --requests 2000
"""

import argparse
import asyncio
import io
import json
import random
import sys
import tarfile
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save

from benchmarks.http_bars import body, events, tenant_client
from benchmarks.processes import Held, held
from examples.local_server import LocalServer, local_server
from polyloom.platform.engine.model.store import pull

ADAPTERS = Path(__file__).parents[1] / "examples" / "adapters"
STEADY = {"support": "support-tickets", "sql": "text-to-sql", "voice": "brand-voice-v1"}
CHURN = "churn"
CHURN_EVERY = 50
WORKERS = 16
WARM_UP = 500
RSS_GROWTH = 0.02


@dataclass
class Tally:
    """What happened, by kind of request and outcome."""

    outcomes: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    pushed: int = 0
    retired: int = 0


@dataclass(frozen=True)
class SoakReport:
    """The end of a soak."""

    tally: Tally
    seconds: float
    warm: Held
    end: Held
    leaks: tuple[str, ...]

    @property
    def growth(self) -> float:
        return self.end.rss / self.warm.rss - 1

    @property
    def ok(self) -> bool:
        return not self.leaks and not self.tally.unexpected and self.growth <= RSS_GROWTH

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.tally.outcomes.items()))
        leaks = "; ".join((*self.leaks, *self.tally.unexpected[:5])) or "none"
        return (
            f"{self.tally.outcomes.total()} requests in {self.seconds:.0f} s ({kinds}), "
            f"{self.tally.pushed} revisions pushed, {self.tally.retired} retired; RSS "
            f"{self.warm.rss >> 20} → {self.end.rss >> 20} MiB ({self.growth:+.2%}), files "
            f"{self.warm.files} → {self.end.files}, threads {self.warm.threads} → "
            f"{self.end.threads}; leaks: {leaks}"
        )


def varied(folder: Path, number: int) -> bytes:
    """The tar of an adapter whose content differs a little from every other number's."""
    tensors = load_file(folder / "adapter_model.safetensors")
    name = min(tensors)
    tensors[name] = tensors[name] * (1 + (number + 1) / 64)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for file, content in (
            ("adapter_config.json", (folder / "adapter_config.json").read_bytes()),
            ("adapter_model.safetensors", save(tensors)),
        ):
            entry = tarfile.TarInfo(file)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


async def push(client: httpx.AsyncClient, name: str, content: bytes) -> int:
    """Upload, promoted to `prod`; the revision's number."""
    answer = await client.post(
        f"/v1/adapters/{name}/revisions",
        params={"wait": "true", "promote": "prod"},
        content=content,
        headers={"content-type": "application/x-tar"},
    )
    answer.raise_for_status()
    number: int = answer.json()["number"]
    return number


class Soak:
    """One soak of one server."""

    def __init__(
        self, server: LocalServer, client: httpx.AsyncClient, base: str, seed: int
    ) -> None:
        self._server = server
        self._client = client
        self._base = base
        self._rng = random.Random(seed)
        self._models = [base, *STEADY, CHURN]
        self.tally = Tally()

    async def run(self, count: int) -> SoakReport:
        for name, folder in STEADY.items():
            await push(self._client, name, varied(ADAPTERS / folder, 0))
        await push(self._client, CHURN, varied(ADAPTERS / "support-tickets", 1))
        self.tally.pushed = len(STEADY) + 1
        start = time.monotonic()
        churn = asyncio.create_task(self._churn())
        await self._load(min(WARM_UP, count))
        warm = held(self._server.pid)
        await self._load(count - min(WARM_UP, count))
        churn.cancel()
        await asyncio.gather(churn, return_exceptions=True)
        seconds = time.monotonic() - start
        leaks = await self._leaks()
        return SoakReport(self.tally, seconds, warm, held(self._server.pid), leaks)

    async def _load(self, count: int) -> None:
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                await self._one()

        await asyncio.gather(*(worker() for _ in range(WORKERS)))

    async def _one(self) -> None:
        luck = self._rng.random()
        try:
            if luck < 0.10:
                await self._cancelled()
            elif luck < 0.15:
                await self._bad()
            else:
                await self._good()
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.tally.unexpected.append(f"{type(error).__name__}: {error}")

    async def _good(self) -> None:
        model = self._rng.choice(self._models)
        request = body(model, self._rng.randint(1, 16), stream=False)
        answer = await self._client.post("/v1/completions", json=request)
        if answer.status_code == httpx.codes.NOT_FOUND and model == CHURN:
            self.tally.outcomes["good, revision just retired"] += 1
            return
        answer.raise_for_status()
        served = answer.headers["x-polyloom-revision"]
        if served.split("@")[0] != model:
            self.tally.unexpected.append(f"{model} answered by {served}")
        self.tally.outcomes["good"] += 1

    async def _cancelled(self) -> None:
        wanted = self._rng.randint(0, 3)
        request = body(self._rng.choice(self._models[:-1]), 64)
        async with aclosing(events(self._client, request)) as lines:  # type: ignore[type-var]
            async for _ in lines:
                wanted -= 1
                if wanted < 0:
                    break
        self.tally.outcomes["cancelled"] += 1

    async def _bad(self) -> None:
        bad: tuple[dict[str, Any], int] = self._rng.choice(
            (
                (body("nobody", 4), 404),
                (body("support@99", 4), 404),
                (body(self._base, 4, temperature=-1), 400),
                (body(self._base, 4, surprise=True), 400),
                (body(self._base, 10**6), 400),
                (body(self._base, 4, prompt=[10**9]), 400),
            )
        )
        request, expected = bad
        answer = await self._client.post("/v1/completions", json=request)
        if answer.status_code != expected:
            self.tally.unexpected.append(f"{answer.status_code} for {json.dumps(request)[:200]}")
        self.tally.outcomes["bad"] += 1

    async def _churn(self) -> None:
        """Push, promote, retire what was before; once every so many requests."""
        previous, number = 1, 2
        while True:
            while self.tally.outcomes.total() < number * CHURN_EVERY:
                await asyncio.sleep(0.1)
            content = varied(ADAPTERS / "support-tickets", number)
            latest = await push(self._client, CHURN, content)
            self.tally.pushed += 1
            path = f"/v1/adapters/{CHURN}/revisions/{previous}"
            (await self._client.delete(path)).raise_for_status()
            self.tally.retired += 1
            previous, number = latest, number + 1

    async def _leaks(self) -> tuple[str, ...]:
        """What is held although nothing runs."""
        async with self._server.admin() as admin:
            give_up = time.monotonic() + 10
            while True:
                engine = (await admin.get("/admin/engine")).json()
                found = _found(engine)
                if not found or time.monotonic() > give_up:
                    break
                await asyncio.sleep(0.5)
        return (*found, *self._files_left())

    def _files_left(self) -> list[str]:
        staging = [p for p in self._server.data_dir.glob("staging/**/*") if p.is_file()]
        return [f"{len(staging)} files in staging"] if staging else []


def _found(engine: dict[str, Any]) -> list[str]:
    status, found = engine["status"], []
    if engine["sequences"]:
        found.append(f"{len(engine['sequences'])} sequences")
    if status["blocks_free"] != status["blocks_total"]:
        found.append(f"{status['blocks_total'] - status['blocks_free']} blocks")
    if pinned := [a["digest"] for a in engine["adapters"] if a["pinned_by"]]:
        found.append(f"pins on {pinned}")
    if len(engine["adapters"]) > len(STEADY) + 1:
        found.append(f"{len(engine['adapters'])} adapters on the device")
    return found


async def run_soak(count: int, base_folder: Path, seed: int = 0) -> SoakReport:
    """A server of its own, soaked."""
    async with local_server(str(base_folder)) as server:
        key = await server.create_tenant(
            "soak", ("inference", "adapters:read", "adapters:write", "usage:read")
        )
        async with tenant_client(server, key) as client:
            models = (await client.get("/v1/models")).json()["data"]
            return await Soak(server, client, models[0]["id"], seed).run(count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--data-dir", type=Path, default=Path.home() / ".cache/polyloom/test-base")
    options = parser.parse_args()
    base = pull("smollm2-135m-instruct", options.data_dir).folder
    report = asyncio.run(run_soak(options.requests, base))
    print(f"soak: {report}")
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
