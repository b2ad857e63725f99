"""Time to the first token with a warm prefix, against that of the new tokens alone.

    python -m benchmarks.warm_prefix

Chats as clients send them, rendered by the base's template: a long system prompt that the cache
knows and a new question, against the same kind of question with the system prompt left to the
template.
"""

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bars import Bar, show_bars
from benchmarks.http_bars import tenant_client
from examples.local_server import LocalServer, local_server
from polyloom.platform.engine.model.store import pull

DATA_DIR = Path.home() / ".cache/polyloom/test-base"
ROUNDS = 30
PREFIX_TOKENS = 512
BOUND = 1.3
TOPICS = ("billing", "refunds", "shipping", "returns", "orders", "accounts", "privacy", "support")
SUBJECTS = ("lamp", "chair", "kettle", "desk", "sofa", "radio", "clock", "mirror", "carpet", "vase")


@dataclass(frozen=True)
class WarmPrefix:
    """Medians of the time to the first token in seconds, and the tokens of both prompts."""

    warm: float
    alone: float
    cold: float
    cached_tokens: int
    new_tokens: int
    alone_tokens: int

    @property
    def ratio(self) -> float:
        return self.warm / self.alone


def system_prompt(sentences: int) -> str:
    rules = (
        f"Rule {number}: about {TOPICS[number % len(TOPICS)]}, answer politely and in full."
        for number in range(1, sentences + 1)
    )
    return " ".join(rules)


def question(number: int) -> str:
    """Differs from its first words on, so that no question is a prefix of another."""
    subject = SUBJECTS[number % len(SUBJECTS)]
    return (
        f"{number} {subject}s were delivered late and one is broken. "
        "Which of your rules applies here, and what would you tell them?"
    )


async def ask(
    client: httpx.AsyncClient, model: str, system: str, number: int
) -> tuple[float, dict[str, Any]]:
    """Seconds to the first event, and the usage."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question(number)})
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start, first, usage = time.perf_counter(), 0.0, None
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter() - start
            if (found := httpx.Response(200, content=line[6:]).json()).get("usage"):
                usage = found["usage"]
    if usage is None:
        raise RuntimeError("a stream ended without its usage")
    return first, usage


async def warm_prefix(server: LocalServer) -> WarmPrefix:
    """In turns, so that all see the same machine."""
    key = await server.create_tenant("prefixes", ["inference"])
    async with tenant_client(server, key) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        system = await _fitting_system(client, model)
        times: dict[str, list[float]] = {"warm": [], "alone": [], "cold": []}
        usages: dict[str, dict[str, Any]] = {}
        for number in range(1, ROUNDS + 1):
            # A processor is slower right after a long prompt: each of the two follows it as often.
            prompts = {"warm": system, "alone": ""}
            for name in list(prompts)[:: 1 if number % 2 else -1]:
                seconds, usages[name] = await ask(client, model, prompts[name], number)
                times[name].append(seconds)
            seconds, _ = await ask(client, model, f"{number} {system}", number)
            times["cold"].append(seconds)
        warm, alone = usages["warm"], usages["alone"]
        cached = warm["prompt_tokens_details"]["cached_tokens"]
        return WarmPrefix(
            warm=statistics.median(times["warm"]),
            alone=statistics.median(times["alone"]),
            cold=statistics.median(times["cold"]),
            cached_tokens=cached,
            new_tokens=warm["prompt_tokens"] - cached,
            alone_tokens=alone["prompt_tokens"] - alone["prompt_tokens_details"]["cached_tokens"],
        )


async def _fitting_system(client: httpx.AsyncClient, model: str) -> str:
    """The shortest system prompt that makes a prefix of at least `PREFIX_TOKENS` tokens."""
    for sentences in range(20, 80):
        system = system_prompt(sentences)
        _, usage = await ask(client, model, system, 0)
        if usage["prompt_tokens"] >= PREFIX_TOKENS + 32:
            return system
    raise RuntimeError("no system prompt is long enough")


def warm_bars(found: WarmPrefix) -> Iterator[Bar]:
    name = f"TTFT of {found.cached_tokens} warm and {found.new_tokens} new tokens"
    figure = (
        f"{found.ratio:.2f} × that of {found.alone_tokens} tokens alone "
        f"({found.warm * 1e3:.0f}, {found.alone * 1e3:.0f} ms; cold {found.cold * 1e3:.0f} ms)"
    )
    reused = found.cached_tokens >= PREFIX_TOKENS - 16
    yield Bar(name, figure, f"≤ {BOUND} ×", found.ratio <= BOUND and reused)


async def served() -> Iterator[Bar]:
    base = pull("smollm2-135m-instruct", DATA_DIR).folder
    async with local_server(str(base)) as server:
        return warm_bars(await warm_prefix(server))


if __name__ == "__main__":
    sys.exit(show_bars(asyncio.run(served())))
