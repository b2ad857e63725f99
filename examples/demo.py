"""The whole way in one run: serve, push, ask, promote while asked, roll back, retire.

    python -m examples.demo        # from the repository's root; `make demo` installs first

Takes a free port and a temporary data directory, and leaves nothing behind.
"""

import asyncio
import io
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from openai import AsyncOpenAI, NotFoundError
from rich.console import Console
from rich.table import Table

from examples.cases import Case
from examples.local_server import LocalServer, local_server
from examples.tasks import held_out, passed

ADAPTERS = Path(__file__).parent / "adapters"
BASE = "smollm2-135m-instruct"
SCOPES = ("inference", "adapters:read", "adapters:write")
console = Console(width=118)


class DemoError(RuntimeError):
    """The server did something else than it promises."""


@dataclass(frozen=True)
class Asked:
    """One request's answer, and who gave it."""

    model: str
    revision: str
    question: str
    answer: str


def packed(folder: Path) -> bytes:
    """A PEFT folder as the tar that an upload is."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, arcname=".")
    return buffer.getvalue()


async def push(tenant: httpx.AsyncClient, name: str, folder: str, promote: str | None) -> None:
    """Upload a folder as the adapter's next revision and wait for its verdict."""
    parameters = {"wait": "true"} | ({"promote": promote} if promote else {})
    answer = await tenant.post(
        f"/v1/adapters/{name}/revisions",
        params=parameters,
        content=packed(ADAPTERS / folder),
        headers={"content-type": "application/gzip"},
    )
    if answer.is_error:
        raise DemoError(f"pushing {folder}: {answer.text}")
    view = answer.json()
    console.print(
        f"  {name}@{view['number']}  {view['state']}  rank {view['rank']}  {view['digest'][:19]}…  "
        f"against PEFT {view['max_logprob_diff']:.1e}" + (f"  → {promote}" if promote else "")
    )


async def ask(client: AsyncOpenAI, model: str, case: Case, tokens: int = 48) -> Asked:
    """One greedy chat request; the revision comes from the response's header."""
    response = await client.chat.completions.with_raw_response.create(
        model=model,
        messages=list(case.messages),  # type: ignore[arg-type]  # plain dicts are what it sends
        max_tokens=tokens,
        temperature=0,
    )
    text = response.parse().choices[0].message.content or ""
    revision = response.headers["x-polyloom-revision"]
    return Asked(model, revision, case.messages[-1]["content"], text.strip())


def show(title: str, answers: Sequence[Asked]) -> None:
    table = Table("model asked", "answered by", "question", "answer", title=title, expand=True)
    for asked in answers:
        table.add_row(asked.model, asked.revision, asked.question[-70:], asked.answer[:110])
    console.print(table)


async def mixed_requests(client: AsyncOpenAI) -> None:
    """The base and every adapter in one batch."""
    work = [
        (model, case)
        for task, model in (
            ("support-tickets", "support"),
            ("text-to-sql", "sql"),
            ("brand-voice-v1", "voice"),
        )
        for case in held_out(task)[:3]
    ]
    work += [(BASE, case) for _, case in work[::3]]
    answers = await asyncio.gather(*(ask(client, model, case) for model, case in work))
    show("Twelve concurrent requests, three adapters and the base", answers)
    right = sum(
        passed("support-tickets", asked.answer, case)
        for asked, (_, case) in zip(answers[:3], work[:3], strict=True)
    )
    console.print(f"  {right} of 3 tickets are right to the field\n")


async def promote_under_load(client: AsyncOpenAI, tenant: httpx.AsyncClient) -> None:
    """Requests run all the time while `prod` moves to revision 2 and back."""
    cases = held_out("brand-voice-v1")
    answers: list[Asked] = []
    stop = asyncio.Event()

    async def keep_asking(offset: int) -> None:
        number = offset
        while not stop.is_set():
            answers.append(await ask(client, "voice", cases[number % len(cases)], tokens=24))
            number += 4

    url = "/v1/adapters/voice/aliases/prod"
    async with asyncio.TaskGroup() as group:
        for offset in range(4):
            group.create_task(keep_asking(offset))
        await wait_for(answers, 4)
        (await tenant.put(url, json={"revision": 2, "reason": "demo"})).raise_for_status()
        moved = len(answers)
        await wait_for(answers, moved + 9)
        (await tenant.post(f"{url}/rollback", json={"reason": "demo"})).raise_for_status()
        rolled_back = len(answers)
        await wait_for(answers, rolled_back + 9)
        stop.set()
    order = [asked.revision for asked in answers]
    console.print(f"  revisions that answered, in order of their end: {' '.join(order)}")
    if not {"voice@1", "voice@2"} == set(order):
        raise DemoError(f"only {set(order)} answered")
    # four requests were running at each change: they finish on what they began with
    if "voice@1" in order[moved + 4 : rolled_back] or "voice@2" in order[rolled_back + 4 :]:
        raise DemoError("a request that began after the change was answered by the old revision")
    show("One question, both revisions, pinned", await both_voices(client, cases[0]))


async def wait_for(answers: list[Asked], count: int) -> None:
    while len(answers) < count:
        await asyncio.sleep(0.05)


async def both_voices(client: AsyncOpenAI, case: Case) -> list[Asked]:
    return await asyncio.gather(*(ask(client, f"voice@{number}", case) for number in (1, 2)))


async def retire(client: AsyncOpenAI, tenant: httpx.AsyncClient) -> None:
    (await tenant.delete("/v1/adapters/voice/revisions/2")).raise_for_status()
    for model in ("voice@2", "nobody"):
        try:
            await ask(client, model, held_out("brand-voice-v1")[0])
        except NotFoundError as error:
            console.print(f"  {model}: 404 {error.code}")
        else:
            raise DemoError(f"{model} was answered")


async def tour(server: LocalServer) -> None:
    key = await server.create_tenant("acme", SCOPES)
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=600)
    headers = {"authorization": f"Bearer {key}"}
    async with (
        client,
        httpx.AsyncClient(base_url=server.url, headers=headers, timeout=600) as tenant,
    ):
        console.rule("Push: each revision is compared with PEFT before it is ready")
        await push(tenant, "support", "support-tickets", "prod")
        await push(tenant, "sql", "text-to-sql", "prod")
        await push(tenant, "voice", "brand-voice-v1", "prod")
        await push(tenant, "voice", "brand-voice-v2", None)
        console.rule("Ask")
        await mixed_requests(client)
        console.rule("Promote voice@2 while requests run, then roll back")
        await promote_under_load(client, tenant)
        console.rule("Retire voice@2: gone is gone, and never the base instead")
        await retire(client, tenant)


async def main() -> None:
    console.print("starting the server: it fetches and converts the base, and compiles its ops…")
    async with local_server(BASE) as server:
        console.print(f"serving {BASE} at {server.url}")
        await tour(server)
    console.print("done: the server is stopped and its data directory removed")


if __name__ == "__main__":
    asyncio.run(main())
