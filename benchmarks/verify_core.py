"""Measures every quality bar of the serving core: one line a bar, a count, and an exit status.

    make verify-core

Each bar is measured against its reference in this same run. docs/verification.md says how to read
the lines.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.bars import Bar, show_bars
from benchmarks.http_bars import (
    IDLE_STREAMS,
    IdleStreams,
    KilledEngine,
    api_overhead,
    idle_streams,
    killed_engine,
    tenant_client,
)
from benchmarks.parity import ParityReport, run_smollm2, run_tiny
from benchmarks.seeds import run_seeds
from benchmarks.soak import run_soak
from benchmarks.throughput import run_throughput, show
from examples.local_server import local_server
from polyloom.platform.engine.model.store import pull

DATA_DIR = Path.home() / ".cache/polyloom/test-base"
TINY_REQUESTS, REAL_REQUESTS, SEED_REQUESTS, SOAK_REQUESTS = 2000, 120, 300, 2000
IDLE_RATIO = 1.05
# Drafts would make the busy streams' steps unlike, and end them before all windows are measured.
IDLE_SERVER = ("--max-running", "2", "--drafts", "off")


def parity_bars(name: str, report: ParityReport) -> Iterator[Bar]:
    figure = f"{report.largest_difference:.1e}"
    yield Bar(f"{name} logprobs", figure, "≤ 1e-3 of PEFT's", report.largest_difference <= 1e-3)
    tokens = f"{report.wrong} wrong, {report.near_ties} near ties in {report.tokens} tokens"
    yield Bar(f"{name} tokens", tokens, "none wrong", report.wrong == 0)
    covered = f"{report.cases} requests, {report.preemptions} preemptions, {report.chunked} chunked"
    exercised = report.preemptions > 0 and report.chunked > 0
    yield Bar(f"{name} mix", covered, "preempted and chunked", exercised)


def parity_and_seeds() -> Iterator[Bar]:
    yield from parity_bars("parity, tiny", run_tiny(TINY_REQUESTS))
    yield from parity_bars("parity, SmolLM2", run_smollm2(REAL_REQUESTS, DATA_DIR))
    seeds = run_seeds(SEED_REQUESTS)
    figure = f"{seeds.equal} of {seeds.cases} equal, {seeds.near_ties} near ties"
    yield Bar("one seed, one text", figure, "all, near ties counted", seeds.ok)


def throughput(base: Path) -> Iterator[Bar]:
    report = run_throughput(base)
    show(report)
    yield Bar(
        "throughput of 16 × 16 adapters",
        f"{report.times_peft:.1f} × PEFT's mixed batch",
        "≥ 5 ×",
        report.times_peft >= 5,
    )
    yield Bar(
        "time that 16 adapters add to a step",
        f"{report.times_floor:.2f} × reading their bytes",
        "≤ 2.5 ×",
        report.times_floor <= 2.5,
    )


async def served(base: Path) -> Iterator[Bar]:
    scopes = ("inference", "usage:read")
    async with local_server(str(base)) as server:
        key = await server.create_tenant("bars", scopes)
        async with tenant_client(server, key) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            overhead = await api_overhead(server, client, model)
            killed = await killed_engine(server, client, model)
    async with local_server(str(base), IDLE_SERVER) as server:
        key = await server.create_tenant("bars", scopes)
        async with tenant_client(server, key) as client:
            idle = await idle_streams(server, client, model)
    return served_bars(overhead, killed, idle)


def served_bars(overhead: float, killed: KilledEngine, idle: IdleStreams) -> Iterator[Bar]:
    figure = f"{overhead * 1e3:.1f} ms"
    yield Bar("what HTTP adds to TTFT, p50", figure, "< 5 ms", overhead < 5e-3)
    yield Bar(
        f"step with {IDLE_STREAMS} idle streams",
        f"{idle.ratio:.3f} × without, {idle.left_waiting} left after they went",
        f"≤ {IDLE_RATIO} ×, none left",
        idle.ratio <= IDLE_RATIO and idle.left_waiting == 0,
    )
    yield Bar(
        "engine killed under streams",
        f"{killed.errors} of {killed.streams} told after {killed.error_after:.2f} s, next answer "
        f"after {killed.answered_after:.1f} s",
        "all within 2 s",
        killed.errors == killed.streams and killed.error_after <= 2,
    )


async def soak(base: Path) -> Iterator[Bar]:
    report = await run_soak(SOAK_REQUESTS, base)
    print(report)
    leaks = "; ".join((*report.leaks, *report.tally.unexpected[:3])) or "nothing left over"
    clean = not report.leaks and not report.tally.unexpected
    growth = f"{report.growth:+.2%} after the first 500"
    return iter(
        (
            Bar(f"soak of {SOAK_REQUESTS} requests", leaks, "all accounted for", clean),
            Bar("soak, resident memory", growth, "≤ +2 %", report.growth <= 0.02),
        )
    )


def all_bars() -> Iterator[Bar]:
    base = pull("smollm2-135m-instruct", DATA_DIR).folder
    yield from throughput(base)
    yield from asyncio.run(served(base))
    yield from asyncio.run(soak(base))
    yield from parity_and_seeds()


def main() -> int:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    return show_bars(all_bars())


if __name__ == "__main__":
    sys.exit(main())
