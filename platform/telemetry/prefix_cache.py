"""Metrics of prefix caches: what requests reused as they end, what engines hold when asked."""

from collections.abc import Callable, Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.util.types import AttributeValue

from polyloom.platform.engine.messages import CacheOutcome, CacheReport, NamespaceCounters

Attributes = dict[str, AttributeValue]
Reports = Callable[[], Mapping[int, CacheReport]]


class PrefixCacheMetrics:
    """Counters by tenant and revision; evictions and invalidations by the cache's owner, from the
    engines' last reports. Salts, prompts and clients' strings are no labels."""

    def __init__(self, meter: Meter, reports: Reports) -> None:
        self._reports = reports
        self._eligible = meter.create_counter("polyloom.prefix.requests.eligible")
        self._hits = meter.create_counter("polyloom.prefix.requests.hit")
        self._misses = meter.create_counter("polyloom.prefix.requests.missed")
        self._tokens = meter.create_counter("polyloom.prefix.tokens.reused", unit="{token}")
        self._bytes = meter.create_counter("polyloom.prefix.bytes.reused", unit="By")
        self._saved = meter.create_counter("polyloom.prefix.prefill.saved", unit="s")
        meter.create_observable_counter("polyloom.prefix.evictions", [self._observe("evictions")])
        meter.create_observable_gauge("polyloom.prefix.blocks", [self._observe("blocks")])
        meter.create_observable_gauge("polyloom.prefix.blocks.held", [self._observe("held_blocks")])
        meter.create_observable_counter(
            "polyloom.prefix.invalidations", [self._observe_invalidations]
        )
        meter.create_observable_counter(
            "polyloom.prefix.isolation.violations", [self._observe_isolation]
        )

    def record(self, tenant: str, revision: str, outcome: CacheOutcome) -> None:
        """Count one sequence. revision: `<adapter>@<number>`, or `base`."""
        attributes: Attributes = {"polyloom.tenant": tenant, "gen_ai.response.model": revision}
        if outcome.eligible:
            self._eligible.add(1, attributes)
        if outcome.cached:
            self._hits.add(1, attributes)
            self._tokens.add(outcome.cached, attributes)
            self._bytes.add(outcome.bytes, attributes)
            self._saved.add(outcome.saved, attributes)
        if outcome.miss is not None:
            self._misses.add(1, attributes | {"reason": outcome.miss.reason})

    def _observe(self, field: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            return [
                Observation(getattr(namespace, field), attributes)
                for attributes, namespace in self._namespaces()
            ]

        return observe

    def _observe_invalidations(self, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(blocks, attributes | {"cause": cause})
            for attributes, namespace in self._namespaces()
            for cause, blocks in namespace.invalidations.items()
        ]

    def _observe_isolation(self, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(report.cross_namespace_hits, {"polyloom.engine": index})
            for index, report in self._reports().items()
        ]

    def _namespaces(self) -> Iterable[tuple[Attributes, NamespaceCounters]]:
        for index, report in self._reports().items():
            for namespace in report.namespaces:
                attributes: Attributes = {
                    "polyloom.engine": index,
                    "polyloom.owner": f"{namespace.owner.kind}:{namespace.owner.name}",
                    "polyloom.adapter.digest": namespace.adapter_digest or "",
                }
                yield attributes, namespace
