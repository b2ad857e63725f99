"""Many open streams that wait cost no tasks, no timers' storm and no memory once they end."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from polyloom.platform.app import PROVIDED, build_app
from polyloom.platform.coordination.announcements import Announcements
from polyloom.platform.coordination.limits import RateLimits
from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.engine.messages import Finished, Timings, Tokens
from polyloom.platform.generation.cache_observer import CacheObserver
from polyloom.platform.generation.grammar_checks import GrammarChecks
from polyloom.platform.generation.inference import Inference
from polyloom.platform.generation.prompts import PromptFormats
from polyloom.platform.generation.request_plan import ServedModel
from polyloom.platform.generation.template_workers import TemplateWorkers
from polyloom.platform.generation.tokenizers import TokenizerCache
from polyloom.platform.services.views import Principal, TenantLimits, TenantView, UsageRecord
from polyloom.platform.telemetry.generation import GenerationMetrics
from polyloom.platform.telemetry.metrics import Metrics
from polyloom.platform.telemetry.prefix_cache import PrefixCacheMetrics
from polyloom.routing.request import GenerationRequest
from polyloom.routing.snapshot import BaseEntry, RouteSnapshot

STREAMS = 500
BODY = b'{"model": "base", "prompt": "Hello", "max_tokens": 5, "stream": true}'


class WaitingEngine:
    """One token each, then nothing until told."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.open = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Tokens | Finished, None]:
        self.open += 1
        try:
            yield Tokens(request.sequence_id, (50,))
            await self.go.wait()
            timings = Timings(queued=0.0, first_token=0.1, finished=0.2)
            yield Finished(request.sequence_id, "length", 3, 1, timings)
        finally:
            self.open -= 1

    async def abort(self, sequence_id: str) -> None:
        raise AssertionError("nothing is aborted here")


class Ledger:
    """The key service and the usage recorder of this test."""

    def __init__(self) -> None:
        self.rows: list[UsageRecord] = []

    async def authenticate(self, _: str) -> Principal:
        tenant = TenantView(
            id=1,
            slug="acme",
            state="active",
            limits=TenantLimits(),
            created_at=datetime(2026, 1, 1, tzinfo=UTC),
        )
        return Principal(scopes=frozenset({"inference"}), tenant=tenant, key_id=1)

    def record(self, usage: UsageRecord) -> None:
        self.rows.append(usage)


class Client:
    """One connection that reads everything and never leaves by itself."""

    def __init__(self) -> None:
        self.body = b""
        self.first = asyncio.Event()
        self.left = asyncio.Event()
        self._sent = False

    async def receive(self) -> Any:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": BODY, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.body += message.get("body", b"")
        if self.body:
            self.first.set()

    def scope(self) -> Any:
        headers = [(b"authorization", b"Bearer k"), (b"content-length", str(len(BODY)).encode())]
        return {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/v1/completions",
            "raw_path": b"/v1/completions",
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": ("test", 1),
            "server": ("test", 2),
            "scheme": "http",
        }


async def test_five_hundred_idle_streams_end_without_a_trace(tiny_llama_folder: Path) -> None:
    engine, ledger, metrics, live = WaitingEngine(), Ledger(), Metrics(), LiveState()
    base = BaseEntry("base", "sha256:0", str(tiny_llama_folder), "sha256:1")
    inference = Inference(
        engine=engine,
        routes=lambda: RouteSnapshot(1, {"base": base}),
        served=lambda: ServedModel(1024, 1023, (2,)),
        formats=PromptFormats(TokenizerCache(), tiny_llama_folder, TemplateWorkers()),
        grammars=GrammarChecks(),
        rate_limits=RateLimits(live),
        usage=ledger,  # type: ignore[arg-type]
        metrics=GenerationMetrics(metrics.meter),
        cache=CacheObserver(PrefixCacheMetrics(metrics.meter, dict)),
        announcements=Announcements(live, "test"),
        deadline=600,
    )
    assembly = SimpleNamespace(**dict.fromkeys(PROVIDED))
    assembly.base, assembly.inference, assembly.keys = base, inference, ledger
    app: Any = build_app(assembly)  # type: ignore[arg-type]
    before = len(asyncio.all_tasks())
    clients = [Client() for _ in range(STREAMS)]
    answers = [asyncio.create_task(app(c.scope(), c.receive, c.send)) for c in clients]
    for client in clients:
        await client.first.wait()
    assert engine.open == len(inference.running) == STREAMS
    for client in clients[::2]:  # half of them hang up
        client.left.set()
    await asyncio.gather(*answers[::2])
    assert engine.open == STREAMS // 2
    engine.go.set()
    await asyncio.gather(*answers[1::2])
    assert all(c.body.endswith(b"data: [DONE]\n\n") for c in clients[1::2])
    assert (engine.open, len(inference.running), len(ledger.rows)) == (0, 0, STREAMS)
    reasons = [row.finish_reason for row in ledger.rows]
    assert (reasons.count("cancelled"), reasons.count("length")) == (STREAMS // 2, STREAMS // 2)
    gc.collect()
    assert len(asyncio.all_tasks()) == before
    metrics.close()
    await live.close()
