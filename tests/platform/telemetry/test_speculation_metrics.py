"""Drafts as metrics: by revision, drafter and domain, and by no more of them than is exported."""

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from polyloom.platform.engine.messages import SpeculationLine, SpeculationReport
from polyloom.platform.telemetry.metrics import Metrics
from polyloom.platform.telemetry.speculation import MAX_KINDS, SpeculationMetrics

LINE = SpeculationLine(
    revision="sha256:1",
    drafter="ngram",
    domain="code",
    temperature="greedy",
    steps=5,
    steps_at_zero=2,
    drafted=30,
    accepted=20,
    proposals_by_length=(0, 0, 1, 0, 0, 1, 3),
    accepted_by_position=(5, 5, 4, 3, 2, 1),
    accepted_lengths=(0, 0, 1, 1, 1, 1, 1),
    draft_seconds=0.5,
    verify_seconds=1.5,
    decode_seconds=4.0,
    rejected_seconds=0.25,
    margin=0.3,
    decision=6,
)


Samples = list[tuple[str, dict[str, str], float]]


def scraped(*lines: SpeculationLine) -> Samples:
    """Name, labels and value of each series."""
    metrics = Metrics()
    report = SpeculationReport(
        drafters=("ngram",), lines=lines, controller_seconds=0.125, step_seconds=9.0
    )
    SpeculationMetrics(metrics.meter, lambda: {0: report})
    families = list(text_string_to_metric_families(metrics.scrape().decode()))
    metrics.close()
    return [
        (sample.name.removeprefix("polyloom_speculation_"), sample.labels, sample.value)
        for family in families
        for sample in family.samples
        if sample.name.startswith("polyloom_speculation")
    ]


def of(samples: Samples, name: str, label: str = "") -> dict[str, float]:
    """The values of one instrument by the value of `label`."""
    return {labels.get(label, ""): value for n, labels, value in samples if n == name}


def test_a_line_is_told_whole_and_temperatures_are_put_together() -> None:
    hot = msgspec.structs.replace(LINE, temperature="high", margin=0.1)
    samples = scraped(LINE, hot)
    assert of(samples, "steps_total", "drafted") == {"yes": 10, "no": 4}
    assert of(samples, "tokens_total", "outcome") == {"accepted": 40, "rejected": 20}
    assert of(samples, "proposals_total", "length") == {"2": 2, "5-8": 8}
    assert of(samples, "accepted_lengths_total", "length") == {"2": 2, "3": 2, "4": 2, "5-8": 4}
    positions = {"1": 10, "2": 10, "3": 8, "4": 6, "5-8": 6}
    assert of(samples, "accepted_positions_total", "position") == positions
    parts = {"draft": 1.0, "verify": 3.0, "decode": 8.0, "rejected": 0.5}
    assert of(samples, "time_seconds_total", "part") == parts
    assert of(samples, "gain_per_second") == {"": pytest.approx(10.0)}
    assert of(samples, "margin") == {"": 0.1}
    assert of(samples, "controller_time_seconds_total") == {"": 0.125}


def test_labels_that_clients_make_up_end_in_one_series() -> None:
    lines = [msgspec.structs.replace(LINE, domain=f"d{n}") for n in range(900)]
    samples = scraped(*lines)
    assert sum(name == "proposals_total" for name, _, _ in samples) == 2 * (MAX_KINDS + 1)
    assert not any("overflow" in label for _, labels, _ in samples for label in labels)
    other = [s for s in samples if s[1].get("polyloom_domain") == "other"]
    rest = 900 - MAX_KINDS
    assert of(other, "tokens_total", "outcome") == {"accepted": 20 * rest, "rejected": 10 * rest}
