"""Metrics of drafts by revision, drafter and domain, from the engines' last reports."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from opentelemetry.metrics import CallbackOptions, Meter, Observation
from opentelemetry.util.types import AttributeValue

from polyloom.platform.engine.messages import SpeculationLine, SpeculationReport

MAX_KINDS = 200
"""Kinds with series of their own, the first to come: domains are clients' labels. With eight classes
of length they stay below what an instrument exports."""

OTHER = "other"

_LENGTHS = (0, 1, 2, 3, 4, 8, 16, 31)  # upper ends of the classes
_LABELS = ("0", *(f"{a + 1}-{b}" if b > a + 1 else f"{b}" for a, b in pairwise(_LENGTHS)))

Reports = Callable[[], Mapping[int, SpeculationReport]]
Attributes = dict[str, AttributeValue]


@dataclass(frozen=True)
class _Kind:
    """What has series of its own; temperatures are put together."""

    engine: int
    revision: str
    drafter: str
    domain: str

    @property
    def attributes(self) -> Attributes:
        return {
            "polyloom.engine": self.engine,
            "polyloom.adapter.digest": self.revision,
            "polyloom.drafter": self.drafter,
            "polyloom.domain": self.domain,
        }


class SpeculationMetrics:
    """Observes; costs nothing between scrapes.

    Counters: steps with a draft and without, drafted tokens by what became of them, drafts by
    proposed and by accepted length, accepted tokens by position, time by what it went into.
    Gauges: accepted tokens per second of drafting and verifying, and the margin that the last draft
    was expected to bring.
    """

    def __init__(self, meter: Meter, reports: Reports) -> None:
        self._reports = reports
        self._named: set[_Kind] = set()
        counters = {
            "steps": ("{step}", _steps),
            "tokens": ("{token}", _tokens),
            "time": ("s", _time),
            "proposals": ("{draft}", lambda line: _by_length(line.proposals_by_length, "length")),
            "accepted.lengths": (
                "{draft}",
                lambda line: _by_length(line.accepted_lengths, "length"),
            ),
            "accepted.positions": (
                "{token}",
                lambda line: _by_length((0, *line.accepted_by_position), "position"),
            ),
        }
        for name, (unit, read) in counters.items():
            meter.create_observable_counter(
                f"polyloom.speculation.{name}", [self._sums(read)], unit=unit
            )
        meter.create_observable_gauge("polyloom.speculation.gain", [self._gain], unit="{token}/s")
        meter.create_observable_gauge("polyloom.speculation.margin", [self._margin])
        meter.create_observable_counter(
            "polyloom.speculation.controller.time", [self._controller], unit="s"
        )

    def _lines(self) -> Iterator[tuple[_Kind, SpeculationLine]]:
        for engine, report in self._reports().items():
            for line in report.lines:
                kind = _Kind(engine, line.revision or "", line.drafter, line.domain)
                if kind not in self._named and len(self._named) < MAX_KINDS:
                    self._named.add(kind)
                if kind not in self._named:
                    kind = _Kind(engine, OTHER, line.drafter, OTHER)
                yield kind, line

    def _sums(self, read: "Read") -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            sums: dict[tuple[_Kind, str, str], float] = {}
            for kind, line in self._lines():
                for label, value, amount in read(line):
                    key = (kind, label, value)
                    sums[key] = sums.get(key, 0.0) + amount
            return [
                Observation(amount, kind.attributes | {label: value})
                for (kind, label, value), amount in sums.items()
            ]

        return observe

    def _gain(self, _: CallbackOptions) -> Iterable[Observation]:
        totals: dict[_Kind, tuple[int, float]] = {}
        for kind, line in self._lines():
            accepted, seconds = totals.get(kind, (0, 0.0))
            spent = line.draft_seconds + line.verify_seconds
            totals[kind] = accepted + line.accepted, seconds + spent
        return [
            Observation(accepted / seconds, kind.attributes)
            for kind, (accepted, seconds) in totals.items()
            if seconds
        ]

    def _margin(self, _: CallbackOptions) -> Iterable[Observation]:
        """Of several temperatures that of the line used last."""
        last = {kind: line.margin for kind, line in self._lines()}
        return [Observation(margin, kind.attributes) for kind, margin in last.items()]

    def _controller(self, _: CallbackOptions) -> Iterable[Observation]:
        return [
            Observation(report.controller_seconds, {"polyloom.engine": engine})
            for engine, report in self._reports().items()
        ]


Read = Callable[[SpeculationLine], Iterable[tuple[str, str, float]]]
"""A line's counts as (label, its value, amount)."""


def _steps(line: SpeculationLine) -> Iterable[tuple[str, str, float]]:
    return (("drafted", "yes", line.steps), ("drafted", "no", line.steps_at_zero))


def _tokens(line: SpeculationLine) -> Iterable[tuple[str, str, float]]:
    rejected = line.drafted - line.accepted
    return (("outcome", "accepted", line.accepted), ("outcome", "rejected", rejected))


def _time(line: SpeculationLine) -> Iterable[tuple[str, str, float]]:
    """`rejected` is a part of drafting and verifying, not beside them."""
    return (
        ("part", "draft", line.draft_seconds),
        ("part", "verify", line.verify_seconds),
        ("part", "decode", line.decode_seconds),
        ("part", "rejected", line.rejected_seconds),
    )


def _by_length(histogram: Sequence[int], label: str) -> Iterable[tuple[str, str, float]]:
    """Counts by class of length. histogram: by length, from 0."""
    for length, count in enumerate(histogram):
        if count:
            yield label, _LABELS[bisect_left(_LENGTHS, length)], count
