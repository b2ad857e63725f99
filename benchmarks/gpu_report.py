"""Figures of a run on a device: the table, the JSON, and the clock that they come from."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

LIMIT_SECONDS = 450


@dataclass
class Report:
    """What a run found; written as JSON. rows: (what, figure, unit, against).

    bandwidth, rate: bytes and products a second of this device, measured in the run.
    """

    device: str
    bandwidth: float = 0.0
    rate: float = 0.0
    rows: list[tuple[str, float, str, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, what: str, figure: float, unit: str, against: str = "") -> None:
        self.rows.append((what, figure, unit, against))
        print(f"{what:<68} {figure:12.4g} {unit:<8} {against}", flush=True)

    def bar(self, what: str, figure: float, unit: str, bar: str, ok: bool | None) -> None:
        """A figure with a bar; ok is None where this device says nothing about it."""
        verdict = {True: "ok", False: "FALLS SHORT", None: "not measured"}[ok]
        self.add(what, figure, unit, f"({bar}) {verdict}")
        if ok is False:
            self.failures.append(what)


class Clock:
    """Times work on a device; on a CPU it is only there so that the script can be tried."""

    def __init__(self, device: torch.device) -> None:
        self.real = device.type == "cuda"
        self._repeats = 20 if self.real else 1
        self._start = time.monotonic()

    @property
    def over(self) -> bool:
        """No more points: the rest of the run still has to fit."""
        return time.monotonic() - self._start > LIMIT_SECONDS

    def verdict(self, met: bool) -> bool | None:
        """Of a bar of time: None where there is no device to be timed."""
        return met if self.real else None

    def seconds(self, work: Callable[[], object]) -> float:
        """Mean of some repeats after one that does not count."""
        work()
        self.wait()
        start = time.perf_counter()
        for _ in range(self._repeats):
            work()
        self.wait()
        return (time.perf_counter() - start) / self._repeats

    def device_seconds(self, work: Callable[[], object]) -> float:
        """Of the launches alone, without the host's part: `work` as a captured graph."""
        if not self.real:
            return self.seconds(work)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        return self.seconds(graph.replay)

    def host_seconds(self, work: Callable[[], object]) -> float:
        """Until the host is free again, device work not awaited."""
        work()
        self.wait()
        taken = []
        for _ in range(self._repeats):
            start = time.perf_counter()
            work()
            taken.append(time.perf_counter() - start)
            self.wait()
        return sorted(taken)[len(taken) // 2]

    def wait(self) -> None:
        if self.real:
            torch.cuda.synchronize()
