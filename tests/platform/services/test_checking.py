"""Checks: each once, settled by its verdict, taken up again when one was interrupted."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest

from polyloom.platform.errors import DeadlineExceeded, EngineUnavailable
from polyloom.platform.services.checking import RevisionChecker
from polyloom.platform.services.views import CheckJob, FidelityVerdict, PromotionVerdict

if TYPE_CHECKING:
    from conftest import Process

BASE = "sha256:" + "b" * 64
PASSED = FidelityVerdict(max_logprob_diff=1e-5)
Check = Callable[[CheckJob], Awaitable[FidelityVerdict]]


def checker(process: "Process", check: Check) -> RevisionChecker:
    return RevisionChecker(process.registry, check, [BASE], poll_interval=0.02)


async def test_each_revision_is_checked_once_and_settled(process: "Process") -> None:
    acme = await process.tenant()
    checked: list[int] = []

    async def check(job: CheckJob) -> FidelityVerdict:
        checked.append(job.revision.number)
        if job.revision.number == 2:
            return FidelityVerdict(max_logprob_diff=0.5, failure="0.5 is over the bound")
        return PASSED

    workers = [checker(process, check) for _ in range(3)]
    for worker in workers:
        await worker.start()
    begun = [await process.upload(acme, text, promote="prod") for text in ("a", "b", "c")]
    for worker in workers:
        worker.wake()
    settled = [await workers[0].settled(revision, 20) for revision, _ in begun]
    for worker in workers:
        await worker.stop()
    assert [view.state for view in settled] == ["ready", "failed", "ready"]
    assert settled[1].failure == "0.5 is over the bound"
    assert sorted(checked) == [1, 2, 3]
    assert (await process.aliases.get(acme.id, "support", "prod")).number == 3


async def test_an_interrupted_check_is_taken_up_again(process: "Process") -> None:
    acme = await process.tenant()
    begun = asyncio.Event()

    async def hang(_: CheckJob) -> FidelityVerdict:
        begun.set()
        await asyncio.Event().wait()
        return PASSED

    async def passed(_: CheckJob) -> FidelityVerdict:
        return PASSED

    revision, _ = await process.upload(acme, "a")
    first = checker(process, hang)
    await first.start()
    await begun.wait()
    with pytest.raises(DeadlineExceeded, match="support@1"):
        await first.settled(revision, 0.05)
    await first.stop()
    second = checker(process, passed)
    await second.start()
    assert (await second.settled(revision, 20)).state == "ready"
    await second.stop()


async def test_a_lost_engine_is_no_verdict(process: "Process") -> None:
    acme = await process.tenant()
    tries = 0

    async def check(_: CheckJob) -> FidelityVerdict:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise EngineUnavailable("restarting")
        return PASSED

    revision, _ = await process.upload(acme, "a")
    worker = checker(process, check)
    await worker.start()
    assert (await worker.settled(revision, 20)).state == "ready"
    await worker.stop()
    assert tries == 3


async def test_a_check_that_crashes_fails_the_revision(process: "Process") -> None:
    acme = await process.tenant()

    async def check(_: CheckJob) -> FidelityVerdict:
        raise MemoryError("/server/path")

    revision, _ = await process.upload(acme, "a")
    worker = checker(process, check)
    await worker.start()
    settled = await worker.settled(revision, 20)
    await worker.stop()
    assert settled.state == "failed"
    assert settled.failure is not None and "/server" not in settled.failure


async def test_a_revision_retired_during_its_check_stays_retired(process: "Process") -> None:
    acme = await process.tenant()

    async def check(job: CheckJob) -> FidelityVerdict:
        await process.registry.retire(acme.id, "support", job.revision.number, author="key:1")
        return PASSED

    revision, _ = await process.upload(acme, "a", promote="prod")
    worker = checker(process, check)
    await worker.start()
    assert (await worker.settled(revision, 20)).state == "retired"
    await worker.stop()


async def test_a_gate_that_cannot_run_is_tried_again_and_one_that_crashes_promotes_nothing(
    process: "Process",
) -> None:
    acme = await process.tenant()
    tries = 0

    async def check(_: CheckJob) -> FidelityVerdict:
        return PASSED

    async def gate(job: CheckJob) -> PromotionVerdict | None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise EngineUnavailable("restarting")
        if job.revision.number == 2:
            raise RuntimeError("/server/path")
        return PromotionVerdict("prod")

    worker = RevisionChecker(process.registry, check, [BASE], promotion=gate, poll_interval=0.02)
    await worker.start()
    settled = []
    for text in ("a", "b"):
        revision, _ = await process.upload(acme, text, promote="prod")
        settled.append(await worker.settled(revision, 20))
    await worker.stop()
    assert tries == 3
    assert [(view.state, view.not_promoted) for view in settled] == [
        ("ready", None),
        ("ready", "its gate ended unexpectedly"),
    ]
    assert (await process.aliases.get(acme.id, "support", "prod")).number == 1
