"""Metrics of inference requests, by OpenTelemetry's GenAI conventions where they have a name."""

from opentelemetry.metrics import Meter
from opentelemetry.util.types import AttributeValue

from polyloom.platform.services.views import UsageRecord

# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/
DURATION_BUCKETS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 81.92]
FIRST_TOKEN_BUCKETS = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
]  # fmt: skip
PER_TOKEN_BUCKETS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5]
TOKEN_BUCKETS = [4.0**power for power in range(14)]

_OPERATIONS = {
    "chat.completions": "chat",
    "completions": "text_completion",
    "gate": "text_completion",
}

Attributes = dict[str, AttributeValue]


class GenerationMetrics:
    """Records each finished request once, from the same facts as its usage row."""

    def __init__(self, meter: Meter) -> None:
        self._requests = meter.create_counter(
            "polyloom.requests", description="Finished inference requests"
        )
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            unit="s",
            description="From admission to the last token",
            explicit_bucket_boundaries_advisory=DURATION_BUCKETS,
        )
        self._first_token = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            unit="s",
            description="In the engine, from arrival to the first token",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_BUCKETS,
        )
        self._per_token = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            unit="s",
            description="Mean time between tokens after the first",
            explicit_bucket_boundaries_advisory=PER_TOKEN_BUCKETS,
        )
        self._queue = meter.create_histogram(
            "polyloom.request.queue_time",
            unit="s",
            description="In the engine, from arrival to the first step",
            explicit_bucket_boundaries_advisory=FIRST_TOKEN_BUCKETS,
        )
        self._tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens of a request, by type",
            explicit_bucket_boundaries_advisory=TOKEN_BUCKETS,
        )
        self._drafts = meter.create_counter(
            "polyloom.drafts.tokens", unit="{token}", description="Drafted tokens, by what became"
        )

    def record(self, *, tenant: str, usage: UsageRecord) -> None:
        """Count one finished request."""
        attributes = _attributes(tenant, usage)
        self._requests.add(1, attributes | {"polyloom.finish_reason": usage.finish_reason})
        failed: Attributes = {"error.type": "error"} if usage.finish_reason == "error" else {}
        self._duration.record(usage.duration, attributes | failed)
        self._tokens.record(usage.prompt_tokens, attributes | {"gen_ai.token.type": "input"})
        self._tokens.record(usage.completion_tokens, attributes | {"gen_ai.token.type": "output"})
        accepted, rejected = usage.accepted_draft_tokens, usage.rejected_draft_tokens
        if accepted or rejected:
            self._drafts.add(accepted, attributes | {"outcome": "accepted"})
            self._drafts.add(rejected, attributes | {"outcome": "rejected"})
        if usage.ttft is not None:
            self._first_token.record(usage.ttft, attributes)
            self._queue.record(usage.queue_time, attributes)
        if usage.itl is not None:
            self._per_token.record(usage.itl, attributes)


def _attributes(tenant: str, usage: UsageRecord) -> Attributes:
    """Bounded: what the route resolved to, never the string that the client wrote."""
    revision = "base" if usage.adapter is None else f"{usage.adapter}@{usage.revision}"
    return {
        "gen_ai.operation.name": _OPERATIONS[usage.endpoint],
        "gen_ai.provider.name": "polyloom",
        "gen_ai.response.model": revision,
        "polyloom.tenant": tenant,
        "polyloom.adapter": usage.adapter or "",
        "polyloom.revision": usage.revision or 0,
    }
