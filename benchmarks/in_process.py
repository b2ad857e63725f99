"""Drives an engine in this process with requests that arrive by the clock, and records its answers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from polyloom.platform.engine.messages import Finished, Tokens
from polyloom.platform.engine.step import Engine
from polyloom.routing.request import GenerationRequest


@dataclass(frozen=True)
class Arrival:
    """A request that is sent `at` seconds after the start."""

    at: float
    request: GenerationRequest


@dataclass
class Stream:
    """One request's answer: when it arrived and when each token came, in seconds from the start."""

    request: GenerationRequest
    arrived: float
    times: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens."""
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass
class Recording:
    """A whole load. steps: seconds of each."""

    streams: dict[str, Stream] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    seconds: float = 0.0


def drive(engine: Engine, arrivals: Sequence[Arrival], until: float | None = None) -> Recording:
    """Send each request when its time has come, and step; to the end, or `until` seconds, when
    what is left is aborted. Raises RuntimeError if the engine refuses or breaks off a request."""
    recording, start = Recording(), time.perf_counter()
    coming = sorted(arrivals, key=lambda arrival: -arrival.at)
    now = 0.0
    while (coming or engine.has_work) and (until is None or now < until):
        while coming and coming[-1].at <= now:
            _send(engine, coming.pop(), recording)
        began, events = now, engine.step()
        now = time.perf_counter() - start
        if events:
            recording.steps.append(now - began)
        elif coming or engine.has_work:
            time.sleep(0.0005)  # for an arrival, or for an adapter
        for event in events:
            _note(event, recording, now)
    recording.seconds = now
    for name, stream in recording.streams.items():
        if not stream.ended:
            engine.abort(name)
    return recording


def _send(engine: Engine, arrival: Arrival, recording: Recording) -> None:
    refused = engine.submit(arrival.request)
    if refused is not None:
        raise RuntimeError(f"refused: {refused.message}")
    stream = Stream(arrival.request, arrival.at)
    recording.streams[arrival.request.sequence_id] = stream


def _note(event: object, recording: Recording, now: float) -> None:
    match event:
        case Tokens(sequence_id=name, token_ids=ids):
            recording.streams[name].times += [now] * len(ids)
        case Finished(sequence_id=name, reason="length" | "stop"):
            recording.streams[name].ended = True
        case Finished(reason=reason, error=error):
            raise RuntimeError(f"ended with {reason}: {error}")
