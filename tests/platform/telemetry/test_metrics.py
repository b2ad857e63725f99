"""Every metric is an instrument of the server's own provider, and its labels are bounded."""

from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from polyloom.platform.engine.messages import Capability, Status
from polyloom.platform.services.views import UsageRecord
from polyloom.platform.telemetry.engine import EngineMetrics
from polyloom.platform.telemetry.generation import GenerationMetrics
from polyloom.platform.telemetry.metrics import Metrics

USAGE = UsageRecord(
    request_id="r",
    tenant_id=1,
    key_id=1,
    endpoint="chat.completions",
    model="what the client wrote",
    adapter="support",
    revision=3,
    adapter_digest="sha256:0",
    fingerprint="fp",
    finish_reason="stop",
    prompt_tokens=10,
    completion_tokens=5,
    cached_tokens=0,
    queue_time=0.01,
    ttft=0.02,
    itl=0.03,
    duration=0.2,
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
)
STATUS = Status(
    time=0.0,
    steps=7,
    running=2,
    waiting=1,
    queue_limit=10,
    blocks_free=3,
    blocks_total=4,
    pages_free={"qkv": 5},
    pages_total={"qkv": 6},
    resident_adapters=1,
    step_seconds_total=0.5,
    prompt_tokens_total=1,
    generated_tokens_total=2,
    preemptions_total=0,
    chunks_total=11,
    chunk_tokens=96,
)


def lines(metrics: Metrics) -> list[str]:
    return [x for x in metrics.scrape().decode().splitlines() if not x.startswith("#")]


def test_a_request_is_counted_under_its_revision() -> None:
    metrics = Metrics()
    generation = GenerationMetrics(metrics.meter)
    generation.record(tenant="acme", usage=USAGE)
    generation.record(tenant="acme", usage=msgspec.structs.replace(USAGE, ttft=None, itl=None))
    found = lines(metrics)
    count = next(x for x in found if x.startswith("polyloom_requests_total"))
    assert count.endswith(" 2.0")
    assert 'polyloom_tenant="acme"' in count
    assert 'gen_ai_response_model="support@3"' in count
    first = [x for x in found if x.startswith("gen_ai_server_time_to_first_token_seconds_count")]
    assert [x.rpartition(" ")[2] for x in first] == ["1.0"]
    assert not any("what the client wrote" in x for x in found)
    metrics.close()


def test_a_client_cannot_make_series_without_bound() -> None:
    metrics = Metrics()
    generation = GenerationMetrics(metrics.meter)
    for revision in range(3000):
        generation.record(tenant="acme", usage=msgspec.structs.replace(USAGE, revision=revision))
    series = [x for x in lines(metrics) if x.startswith("polyloom_requests_total")]
    assert len(series) <= 2001
    metrics.close()


@dataclass
class SeenEngine:
    last_status: Status | None = STATUS
    status_age: float = 0.25


def test_engines_are_told_apart_by_number() -> None:
    metrics = Metrics()
    EngineMetrics(metrics.meter, [SeenEngine(), SeenEngine(None, 9.0)], lambda: ())
    found = [x for x in lines(metrics) if x.startswith("polyloom_engine_heartbeat_age")]
    assert 'polyloom_engine="0"' in found[0] and found[0].endswith(" 0.25")
    assert 'polyloom_engine="1"' in found[1] and found[1].endswith(" 9.0")
    metrics.close()


def test_the_engine_is_observed_when_asked() -> None:
    metrics = Metrics()
    capability = Capability("linear", "cpu", 9, {"float32": 4})
    observed = EngineMetrics(metrics.meter, [SeenEngine()], lambda: (capability,))
    found = lines(metrics)
    assert any(
        x.startswith("polyloom_engine_sequences_running") and x.endswith(" 2.0") for x in found
    )
    assert any(x.startswith("polyloom_engine_chunks_total") and x.endswith(" 11.0") for x in found)
    assert any(x.startswith("polyloom_engine_chunk_tokens") and x.endswith(" 96.0") for x in found)
    assert any(
        'polyloom_pages_free{polyloom_group="qkv"}' in x or ("pages_free" in x and "qkv" in x)
        for x in found
    )
    assert any(
        "capability_fallbacks" in x and 'reason="float32"' in x and x.endswith(" 4.0")
        for x in found
    )
    assert observed is not None
    metrics.close()


def test_two_servers_in_one_process_do_not_share() -> None:
    one, two = Metrics(), Metrics()
    GenerationMetrics(one.meter).record(tenant="acme", usage=USAGE)
    GenerationMetrics(two.meter)
    assert any("acme" in x for x in lines(one))
    assert not any("acme" in x for x in lines(two))
    one.close()
    two.close()
