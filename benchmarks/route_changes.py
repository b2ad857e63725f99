"""Is every answer that of one revision, and of one that was current, while a route keeps changing?

    python -m benchmarks.route_changes

`CLIENTS` clients stream greedy answers through one route, which is changed `CHANGES` times between
three revisions: to one of them, to a canary of two, and back by rollback. Each answer is compared
with what its revision answers when nothing changes.
"""

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from benchmarks.bars import Bar, show_bars
from benchmarks.http_bars import body, tenant_client
from examples.demo import ADAPTERS, packed
from examples.local_server import LocalServer, local_server
from polyloom.platform.engine.model.store import pull

DATA_DIR = Path.home() / ".cache/polyloom/test-base"
SCOPES = ["inference", "adapters:read", "adapters:write", "routes:write"]
FOLDERS = ("brand-voice-v1", "support-tickets", "text-to-sql")
CLIENTS, CHANGES = 16, 50
SECONDS_BETWEEN = 0.5
TOKENS = 10
PROMPTS = (
    "My parcel has not come and nobody answers the phone.",
    "Write to the customer that the shop is closed on Monday.",
    "Which of our orders are above one hundred euros?",
)


class _Choice(msgspec.Struct):
    text: str


class _Piece(msgspec.Struct):
    system_fingerprint: str
    choices: list[_Choice]


@dataclass(frozen=True)
class Answer:
    """One answer: who gave it by the headers, all fingerprints of its stream, its text, and when it
    was sent for and began (monotonic seconds)."""

    revision: str
    route: str
    fingerprints: frozenset[str]
    text: str
    asked: float
    begun: float


@dataclass(frozen=True)
class Version:
    """A version of the route, its revisions, and when its change was sent and answered."""

    revisions: frozenset[str]
    sent: float
    done: float


async def ask(client: httpx.AsyncClient, model: str, prompt: str) -> Answer:
    """Raises httpx.HTTPError."""
    asked, text, fingerprints = time.monotonic(), "", set()
    content = body(model, TOKENS, prompt=prompt)
    async with client.stream("POST", "/v1/completions", json=content) as answer:
        begun = time.monotonic()
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                piece = msgspec.json.decode(line.removeprefix("data: "), type=_Piece)
                fingerprints.add(piece.system_fingerprint)
                text += "".join(choice.text for choice in piece.choices)
        headers = answer.headers
    return Answer(
        revision=headers["x-polyloom-revision"],
        route=headers.get("x-polyloom-route", ""),
        fingerprints=frozenset(fingerprints),
        text=text,
        asked=asked,
        begun=begun,
    )


@dataclass(frozen=True)
class Findings:
    """All answers, what could not be answered, the route's versions, and what each revision answers
    alone: (revision, prompt) → answer."""

    answers: list[tuple[str, Answer]]
    failures: list[str]
    versions: dict[str, Version]
    alone: dict[tuple[str, str], Answer]

    def mixed(self) -> int:
        """Answers that are not, word for word and by fingerprint, those of their revision."""
        wrong = 0
        for prompt, answer in self.answers:
            expected = self.alone[answer.revision, prompt]
            same = answer.text == expected.text and answer.fingerprints == expected.fingerprints
            wrong += not same
        return wrong

    def out_of_date(self) -> int:
        """Answers by a version, or a revision of it, that was not current between their arrival and
        their start."""
        return sum(not self._current(answer) for _, answer in self.answers)

    def _current(self, answer: Answer) -> bool:
        version = self.versions.get(answer.route)
        name, _, number = answer.route.rpartition("@")
        following = self.versions.get(f"{name}@{int(number) + 1}")
        return (
            version is not None
            and answer.revision in version.revisions
            and version.sent <= answer.begun
            and (following is None or following.done >= answer.asked)
        )


async def findings(server: LocalServer) -> Findings:
    """Push the revisions, learn what each answers alone, then change the route under load."""
    key = await server.create_tenant("routes", SCOPES)
    async with tenant_client(server, key) as client:
        revisions = [await _push(client, folder) for folder in FOLDERS]
        alone = {
            (revision, prompt): await ask(client, revision, prompt)
            for revision, prompt in itertools.product(revisions, PROMPTS)
        }
        for prompt in PROMPTS:
            texts = {alone[revision, prompt].text for revision in revisions}
            if len(texts) < len(revisions):
                raise RuntimeError(f"two revisions answer {prompt!r} alike: nothing can be told")
        found = Findings([], [], {}, alone)
        await _change(client, found, {"targets": [{"model": revisions[0]}]})
        over = asyncio.Event()
        clients = [
            asyncio.create_task(_keep_asking(client, found, over, seed)) for seed in range(CLIENTS)
        ]
        rng = random.Random(0)
        for _ in range(CHANGES):
            await asyncio.sleep(SECONDS_BETWEEN)
            await _change(client, found, _next_change(rng, revisions, found))
        over.set()
        await asyncio.gather(*clients)
    return found


async def _push(client: httpx.AsyncClient, folder: str) -> str:
    answer = await client.post(
        "/v1/adapters/voice/revisions",
        params={"wait": "true"},
        content=packed(ADAPTERS / folder),
        headers={"content-type": "application/gzip"},
    )
    answer.raise_for_status()
    return f"voice@{answer.json()['number']}"


def _next_change(rng: random.Random, revisions: list[str], found: Findings) -> dict[str, object]:
    """Another single revision, another canary, or (without targets) a rollback."""
    present = found.versions[f"chat@{len(found.versions)}"].revisions
    if len(found.versions) > 2 and rng.random() < 0.2:
        return {"version": rng.randrange(1, len(found.versions))}
    chosen = frozenset(rng.sample(revisions, rng.choice((1, 2))))
    if chosen == present:
        return _next_change(rng, revisions, found)
    return {"targets": [{"model": model, "weight": 1} for model in sorted(chosen)]}


async def _change(client: httpx.AsyncClient, found: Findings, change: dict[str, object]) -> None:
    sent = time.monotonic()
    if "targets" in change:
        answer = await client.put("/v1/routes/chat", json=change)
    else:
        answer = await client.post("/v1/routes/chat/rollback", json=change)
    answer.raise_for_status()
    view = answer.json()
    models = frozenset(target["model"] for target in view["targets"])
    found.versions[f"chat@{view['version']}"] = Version(models, sent, time.monotonic())


async def _keep_asking(
    client: httpx.AsyncClient, found: Findings, over: asyncio.Event, seed: int
) -> None:
    rng = random.Random(seed)
    while not over.is_set():
        prompt = rng.choice(PROMPTS)
        try:
            found.answers.append((prompt, await ask(client, "chat", prompt)))
        except httpx.HTTPError as error:
            found.failures.append(str(error))


def bars(found: Findings) -> Iterator[Bar]:
    """The bars of the route changes."""
    count = len(found.answers)
    load = f"{len(found.versions) - 1} route changes under {CLIENTS} clients"
    failed, mixed, late = len(found.failures), found.mixed(), found.out_of_date()
    yield Bar(f"{load}: failed", f"{failed} of {count + failed}", "0", failed == 0 < count)
    yield Bar(f"{load}: mixed revisions", f"{mixed} of {count}", "0", mixed == 0)
    yield Bar(f"{load}: not current", f"{late} of {count}", "0", late == 0)


async def route_changes() -> Iterator[Bar]:
    """All bars, on a server of their own: in float32, where a batch changes no word."""
    base = pull("smollm2-135m-instruct", DATA_DIR).folder
    async with local_server(str(base), ["--dtype", "float32"]) as server:
        return bars(await findings(server))


if __name__ == "__main__":
    sys.exit(show_bars(asyncio.run(route_changes())))
