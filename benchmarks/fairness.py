"""Do tenants get their shares? Two loads on the engine, each beside a control that must fall short.

    python -m benchmarks.fairness

SmolLM2 in bfloat16 on this CPU. *Backlogged*: four tenants with more to do than there is time for,
one of them with 20 adapters, two with one, one with none: Jain's index over the tokens that ran for
them. *Flooded*: three tenants with a request now and then, and one with hundreds of long answers at
once: what part of the three's requests was answered, and their p95 time to the first token against
the same requests on an idle engine plus two steps of the flooded one (as a request that comes at a
random moment finds them: the mean weighted by length). In each control the same requests come under
one tenant's name, so that nothing but adapters and arrival tells them apart.
"""

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from benchmarks.adapters import AdapterShape, make_adapters
from benchmarks.bars import Bar, show_bars
from benchmarks.in_process import Arrival, Recording, drive
from benchmarks.load import request
from benchmarks.parity import BASE_DIGEST, sources
from polyloom.adapters.source import AdapterSource
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.model.store import pull
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.step import Engine

MANY_ADAPTERS = 20
MAX_RUNNING = 16
BACKLOG_SECONDS, FLOOD_SECONDS, DRAIN_SECONDS = 20.0, 25.0, 5.0
MODEST = ("ada", "ben", "cyn")
REQUEST_EVERY = 1.5  # seconds, of each modest tenant on average
JAIN, DEMAND, LOADED_STEPS = 0.95, 0.95, 2
VOCABULARY = 49_000


@dataclass(frozen=True)
class FloodReport:
    """answered: part of the modest tenants' requests.  first_p95, solo_p95, step: seconds."""

    answered: float
    first_p95: float
    solo_p95: float
    step: float

    @property
    def bound(self) -> float:
        return self.solo_p95 + LOADED_STEPS * self.step

    @property
    def ok(self) -> bool:
        return self.answered >= DEMAND and self.first_p95 <= self.bound


@dataclass(frozen=True)
class FairnessReport:
    """Jain's index of the backlogged tenants, the flood, and of both the control."""

    jain: float
    jain_control: float
    flood: FloodReport
    flood_control: FloodReport


def make_engine(base: Path) -> Engine:
    """Fewer places than a flood can take."""
    settings = EngineSettings(
        model_folder=str(base),
        base_name=str(base),
        base_digest=BASE_DIGEST,
        address="ipc:///unused",
        drafters=(),  # batching alone is measured
        kv_memory=512 << 20,
        adapter_memory=256 << 20,
        threads=torch.get_num_threads(),
        max_running=MAX_RUNNING,
        queue_limit=10_000,
    )
    return build_engine(settings)


def work(
    rng: random.Random, at: float, tenant: str, adapter: AdapterSource | None, prompt: int, out: int
) -> Arrival:
    """One request of `prompt` random tokens."""
    tokens = [rng.randrange(100, VOCABULARY) for _ in range(prompt)]
    made = request(BASE_DIGEST, adapter, tokens, out)
    return Arrival(at, msgspec.structs.replace(made, tenant=tenant))


def backlog(adapters: Sequence[AdapterSource], seed: int) -> list[Arrival]:
    """More than can be answered, all at once, the tenants mixed."""
    rng = random.Random(seed)
    owned: dict[str, Sequence[AdapterSource | None]] = {
        "many": adapters[:MANY_ADAPTERS],
        "one": adapters[MANY_ADAPTERS : MANY_ADAPTERS + 1],
        "other": adapters[MANY_ADAPTERS + 1 :],
        "base": [None],
    }
    return [
        work(rng, 0.0, tenant, own[i % len(own)], rng.randint(20, 150), rng.randint(10, 80))
        for i in range(150)
        for tenant, own in owned.items()
    ]


def modest(seed: int) -> list[Arrival]:
    """A small request of each now and then."""
    rng, arrivals = random.Random(seed), []
    for tenant in MODEST:
        at = 1.0
        while (at := at + rng.expovariate(1 / REQUEST_EVERY)) < FLOOD_SECONDS - DRAIN_SECONDS:
            arrivals.append(work(rng, at, tenant, None, rng.randint(24, 48), rng.randint(5, 15)))
    return arrivals


def flood(seed: int) -> list[Arrival]:
    """More than every place can take, with prompts for nearly every step."""
    rng = random.Random(seed)
    return [
        work(rng, 0.0, "flood", None, rng.randint(300, 600), rng.randint(60, 120))
        for _ in range(200)
    ]


def in_one_line(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests, and nobody knows whose they are."""
    return [Arrival(a.at, msgspec.structs.replace(a.request, tenant="everyone")) for a in arrivals]


def anew(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """The same requests under other ids."""
    return [
        Arrival(a.at, msgspec.structs.replace(a.request, sequence_id=a.request.sequence_id + "'"))
        for a in arrivals
    ]


def jain_of(recording: Recording, owner: dict[str, str]) -> float:
    """Of the tokens that ran or were generated, by who asked for them."""
    tokens: Counter[str] = Counter()
    for name, stream in recording.streams.items():
        if stream.times:
            tokens[owner[name]] += len(stream.request.prompt) + len(stream.times)
    amounts = [tokens[tenant] for tenant in sorted(set(owner.values()))]
    return sum(amounts) ** 2 / (len(amounts) * sum(amount**2 for amount in amounts))


def flooded(recording: Recording, solo: Recording, names: set[str]) -> FloodReport:
    """What became of the modest requests `names`."""
    first = [s.first for name, s in recording.streams.items() if name in names and s.times]
    return FloodReport(
        answered=sum(recording.streams[name].ended for name in names) / len(names),
        first_p95=_p95(first) if len(first) > 1 else float("inf"),
        solo_p95=_p95([s.first for s in solo.streams.values()]),
        step=sum(s * s for s in recording.steps) / sum(recording.steps),
    )


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def run_fairness(base: Path) -> FairnessReport:
    """Both loads and their controls, on one engine."""
    shapes = [AdapterShape(8, ("q_proj", "v_proj"))] * (MANY_ADAPTERS + 2)
    with (
        tempfile.TemporaryDirectory(prefix="polyloom-bench-") as folder,
        contextlib.closing(make_engine(base)) as engine,
    ):
        adapters = sources(base, make_adapters(base, Path(folder), shapes))
        drive(engine, modest(seed=9)[:4])  # warms up

        loads = backlog(adapters, seed=1)
        owner = {a.request.sequence_id: a.request.tenant for a in loads}
        fair = drive(engine, loads, until=BACKLOG_SECONDS)
        control = drive(engine, in_one_line(loads), until=BACKLOG_SECONDS)

        few, many = modest(seed=2), flood(seed=2)
        names = {a.request.sequence_id for a in few}
        solo = drive(engine, anew(few))
        loaded = drive(engine, [*many, *few], until=FLOOD_SECONDS)
        line = drive(engine, in_one_line([*many, *few]), until=FLOOD_SECONDS)
        return FairnessReport(
            jain_of(fair, owner),
            jain_of(control, owner),
            flooded(loaded, solo, names),
            flooded(line, solo, names),
        )


def fairness_bars(report: FairnessReport) -> Iterator[Bar]:
    """Both bars, and a control whose requests come under one name: it must fall short of them."""
    flood, control = report.flood, report.flood_control
    yield Bar(
        "backlogged tenants, one with 20 adapters",
        f"Jain index {report.jain:.3f}",
        f"≥ {JAIN}",
        report.jain >= JAIN,
    )
    yield Bar(
        "modest tenants' demand beside a flood",
        f"{flood.answered:.1%}",
        f"≥ {DEMAND:.0%}",
        flood.answered >= DEMAND,
    )
    alone, step = f"{flood.solo_p95 * 1e3:.0f} alone", f"{flood.step * 1e3:.0f}"
    yield Bar(
        "modest tenants' p95 TTFT beside a flood",
        f"{flood.first_p95 * 1e3:.0f} ms",
        f"≤ {flood.bound * 1e3:.0f} ms: {alone} and {LOADED_STEPS} steps of {step}",
        flood.first_p95 <= flood.bound,
    )
    without = f"Jain index {report.jain_control:.3f}, {control.answered:.1%} answered"
    yield Bar(
        "the same under one name (control)",
        f"{without}, p95 TTFT {control.first_p95:.1f} s",
        "falls short, or nothing was measured",
        report.jain_control < JAIN and not control.ok,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", type=Path, default=Path.home() / ".cache/polyloom/test-base")
    options = parser.parse_args()
    torch.set_num_threads(min(2, torch.get_num_threads()))
    base = pull("smollm2-135m-instruct", options.data_dir).folder
    return show_bars(fairness_bars(run_fairness(base)))


if __name__ == "__main__":
    sys.exit(main())
