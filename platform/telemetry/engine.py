"""Gauges and counters of the engine, observed from its last heartbeat and snapshot."""

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from polyloom.platform.engine.messages import Capability, Status

StatusSource = Callable[[], Status | None]
CapabilitySource = Callable[[], tuple[Capability, ...]]

_GAUGES = {
    "polyloom.engine.sequences.running": "running",
    "polyloom.engine.sequences.waiting": "waiting",
    "polyloom.engine.queue.limit": "queue_limit",
    "polyloom.engine.blocks.free": "blocks_free",
    "polyloom.engine.blocks.total": "blocks_total",
    "polyloom.engine.adapters.resident": "resident_adapters",
}
_COUNTERS = {
    "polyloom.engine.steps": "steps",
    "polyloom.engine.step.seconds": "step_seconds_total",
    "polyloom.engine.prompt_tokens": "prompt_tokens_total",
    "polyloom.engine.generated_tokens": "generated_tokens_total",
    "polyloom.engine.preemptions": "preemptions_total",
}


class EngineMetrics:
    """Observes; costs nothing between scrapes."""

    def __init__(
        self,
        meter: Meter,
        status: StatusSource,
        heartbeat_age: Callable[[], float],
        capabilities: CapabilitySource,
    ) -> None:
        self._status = status
        self._heartbeat_age = heartbeat_age
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

    def _field(self, field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            status = self._status()
            return [] if status is None else [Observation(getattr(status, field))]

        return observe

    def _pages(self, field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            status = self._status()
            pages: dict[str, int] = {} if status is None else getattr(status, field)
            return [Observation(n, {"polyloom.group": group}) for group, n in pages.items()]

        return observe

    def _observe_age(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(self._heartbeat_age())]

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
