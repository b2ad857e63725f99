"""The server's own meter provider, scraped by Prometheus. No process-wide state."""

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

SCOPE = "polyloom"


class Metrics:
    """Instruments are made on `meter`; `scrape` is what `/metrics` answers.

    One instrument exports at most 2,000 attribute sets (the SDK's limit); further ones are summed
    under `otel.metric.overflow`.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=self._registry, scope_info_enabled=False)
        resource = Resource.create({"service.name": "polyloom"})
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        self.meter: Meter = self._provider.get_meter(SCOPE)

    def scrape(self) -> bytes:
        """All metrics in OpenMetrics text."""
        text: bytes = generate_latest(self._registry)  # type: ignore[no-untyped-call]
        return text

    def close(self) -> None:
        """Let go of the instruments."""
        self._provider.shutdown()
