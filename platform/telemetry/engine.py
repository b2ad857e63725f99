"""Gauges and counters of the engine, observed from its last heartbeat and snapshot."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.util.types import AttributeValue

from polyloom.platform.engine.messages import Capability, Status

Attributes = dict[str, AttributeValue]
CapabilitySource = Callable[[], tuple[Capability, ...]]


class ObservedEngine(Protocol):
    """What is observed of `EngineClient`."""

    @property
    def last_status(self) -> Status | None: ...

    @property
    def status_age(self) -> float: ...


_GAUGES = {
    "polyloom.engine.sequences.running": "running",
    "polyloom.engine.sequences.waiting": "waiting",
    "polyloom.engine.queue.limit": "queue_limit",
    "polyloom.engine.blocks.free": "blocks_free",
    "polyloom.engine.blocks.total": "blocks_total",
    "polyloom.engine.adapters.resident": "resident_adapters",
    "polyloom.engine.chunk.tokens": "chunk_tokens",
}
_COUNTERS = {
    "polyloom.engine.steps": "steps",
    "polyloom.engine.step.seconds": "step_seconds_total",
    "polyloom.engine.prompt_tokens": "prompt_tokens_total",
    "polyloom.engine.generated_tokens": "generated_tokens_total",
    "polyloom.engine.preemptions": "preemptions_total",
    "polyloom.engine.pauses": "pauses_total",
    "polyloom.engine.chunks": "chunks_total",
    "polyloom.engine.chunk.changes": "chunk_changes_total",
    "polyloom.engine.chunk.overhead.seconds": "chunk_overhead_seconds_total",
}


class EngineMetrics:
    """Observes; costs nothing between scrapes. Of several engines each has its number."""

    def __init__(
        self, meter: Meter, engines: Sequence[ObservedEngine], capabilities: CapabilitySource
    ) -> None:
        self._engines = engines
        self._capabilities = capabilities
        for name, field in _GAUGES.items():
            meter.create_observable_gauge(name, [self._field(field)])
        for name, field in _COUNTERS.items():
            meter.create_observable_counter(name, [self._field(field)])
        meter.create_observable_gauge("polyloom.engine.pages.free", [self._pages("pages_free")])
        meter.create_observable_gauge("polyloom.engine.pages.total", [self._pages("pages_total")])
        meter.create_observable_gauge(
            "polyloom.engine.heartbeat.age", [self._observe_age], unit="s"
        )
        meter.create_observable_counter("polyloom.capability.engaged", [self._observe_engaged])
        meter.create_observable_counter("polyloom.capability.fallbacks", [self._observe_fallbacks])

    def _statuses(self) -> Iterator[tuple[Attributes, Status]]:
        for number, engine in enumerate(self._engines):
            if engine.last_status is not None:
                yield self._attributes(number), engine.last_status

    def _attributes(self, number: int) -> Attributes:
        return {"polyloom.engine": number} if len(self._engines) > 1 else {}

    def _field(self, field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(getattr(s, field), which) for which, s in self._statuses()]

        return observe

    def _pages(self, field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(pages, which | {"polyloom.group": group})
                for which, status in self._statuses()
                for group, pages in getattr(status, field).items()
            ]

        return observe

    def _observe_age(self, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(engine.status_age, self._attributes(number))
            for number, engine in enumerate(self._engines)
        ]

    def _observe_engaged(self, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(c.engaged, {"polyloom.op": c.name, "implementation": c.implementation})
            for c in self._capabilities()
        ]

    def _observe_fallbacks(self, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(count, {"polyloom.op": c.name, "reason": reason})
            for c in self._capabilities()
            for reason, count in c.fallbacks.items()
        ]
