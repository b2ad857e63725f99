"""Can a tenant tell from its own latency what another tenant has asked?

    python -m benchmarks.cache_timing

Tenant A sends a secret prompt. Tenant B then sends, in random order, the same prompt and one that
nobody has sent, and looks at its own times to the first token. A classifier trained on half of B's
trials is tested on the rest. The control repeats it with one tenant in both roles, whose cache may
show: there the classifier must succeed, or the trial could not have seen a leak.
"""

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from benchmarks.bars import Bar, show_bars
from benchmarks.http_bars import tenant_client
from examples.local_server import LocalServer, local_server
from polyloom.platform.engine.model.store import pull

DATA_DIR = Path.home() / ".cache/polyloom/test-base"
PAIRS, CONTROL_PAIRS = 300, 60
SECRET_WORDS = 160
ISOLATED, SHARED = 0.55, 0.95


@dataclass(frozen=True)
class Trials:
    """B's times to the first token in seconds, for prompts that A had sent and that nobody had."""

    warmed: tuple[float, ...]
    cold: tuple[float, ...]

    def auc(self) -> float:
        """Area under the curve, on the odd trials, of a classifier trained on the even ones."""
        model = LikelihoodRatio(self.warmed[::2], self.cold[::2])
        warmed, cold = model.score(self.warmed[1::2]), model.score(self.cold[1::2])
        wins = (warmed[:, None] > cold[None, :]).mean()
        ties = (warmed[:, None] == cold[None, :]).mean()
        return float(wins + ties / 2)


class LikelihoodRatio:
    """How much likelier a time is after a warming: a ratio of two kernel density estimates (in log
    time, Silverman's bandwidth), so any difference of the distributions counts, not their order."""

    def __init__(self, warmed: tuple[float, ...], cold: tuple[float, ...]) -> None:
        self._warmed, self._cold = np.log(warmed), np.log(cold)
        both = np.concatenate((self._warmed, self._cold))
        self._width = 1.06 * both.std() * len(self._warmed) ** -0.2

    def score(self, times: tuple[float, ...]) -> np.ndarray:
        """Log-likelihood ratio of each time. Shape [len(times)]."""
        logs = np.log(times)
        ratio: np.ndarray = self._density(self._warmed, logs) - self._density(self._cold, logs)
        return ratio

    def _density(self, seen: np.ndarray, at: np.ndarray) -> np.ndarray:
        kernels = np.exp(-0.5 * ((at[:, None] - seen[None, :]) / self._width) ** 2)
        density: np.ndarray = np.log(kernels.mean(axis=1) + 1e-12)
        return density


def secret(rng: random.Random) -> str:
    """A prompt that differs from every other from its first token on."""
    return " ".join(f"{rng.randrange(16**6):06x}" for _ in range(SECRET_WORDS // 4))


async def first_token(client: httpx.AsyncClient, model: str, prompt: str) -> float:
    """Seconds from sending to the first event of the answer."""
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "stream": True, "ignore_eos": True}
    start = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                return time.perf_counter() - start
    raise RuntimeError("a stream ended without an event")


async def run_trials(
    attacker: httpx.AsyncClient, victim: httpx.AsyncClient, model: str, pairs: int, seed: int
) -> Trials:
    """Pairs of a warmed and a cold prompt, each pair's order drawn at random."""
    rng = random.Random(seed)
    warmed: list[float] = []
    cold: list[float] = []
    for _ in range(pairs):
        known, unknown = secret(rng), secret(rng)
        await first_token(victim, model, known)
        asked = [(known, warmed), (unknown, cold)]
        rng.shuffle(asked)
        for prompt, times in asked:
            times.append(await first_token(attacker, model, prompt))
    return Trials(tuple(warmed), tuple(cold))


async def timing(server: LocalServer) -> tuple[Trials, Trials]:
    """The attack between two tenants, and the control within one."""
    keys = [await server.create_tenant(name, ["inference"]) for name in ("victim", "attacker")]
    async with (
        tenant_client(server, keys[0]) as victim,
        tenant_client(server, keys[1]) as attacker,
    ):
        model = (await victim.get("/v1/models")).json()["data"][0]["id"]
        await run_trials(attacker, victim, model, 10, seed=1)
        attack = await run_trials(attacker, victim, model, PAIRS, seed=2)
        control = await run_trials(victim, victim, model, CONTROL_PAIRS, seed=3)
        return attack, control


def timing_bars(attack: Trials, control: Trials) -> Iterator[Bar]:
    isolated, shared = attack.auc(), control.auc()
    name = f"another tenant's prefixes, guessed from {2 * len(attack.cold)} times to first token"
    yield Bar(name, f"AUC {isolated:.3f}", f"≤ {ISOLATED}", isolated <= ISOLATED)
    name = "the same guess without isolation (control)"
    yield Bar(name, f"AUC {shared:.3f}", f"≥ {SHARED}", shared >= SHARED)


async def served() -> Iterator[Bar]:
    base = pull("smollm2-135m-instruct", DATA_DIR).folder
    async with local_server(str(base)) as server:
        return timing_bars(*await timing(server))


if __name__ == "__main__":
    sys.exit(show_bars(asyncio.run(served())))
