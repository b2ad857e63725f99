"""What the API process and the engine process say to each other: msgspec structs over a socket.

Every frame is one msgpack-encoded `Command` (API → engine) or `Event` (engine → API). A peer first
says `Hello`; another version is refused. Several API processes may talk to one engine: events
of a sequence go to the process that submitted it, statuses go to all.
"""

from typing import Literal

import msgspec

from polyloom.routing.request import GenerationRequest

PROTOCOL_VERSION = 1

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First command of an API process; answered by `Welcome`, or by `Refused`."""

    version: int = PROTOCOL_VERSION


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Queue a sequence. Answered by `Tokens` … `Finished`, or by `Refused` alone."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a sequence now; its blocks and pins are free before the next step. No answer needed:
    `Finished(reason="abort")` follows unless it has finished already."""

    sequence_id: str


class Retire(msgspec.Struct, frozen=True, tag="retire"):
    """Unload a revision as soon as no running sequence holds it."""

    adapter_digest: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Refuse new sequences, finish the running ones, then exit."""


class GetSnapshot(msgspec.Struct, frozen=True, tag="get_snapshot"):
    """Ask for `Snapshot`: full accounting of blocks, pages and adapters."""


Command = Hello | Submit | Abort | Retire | Drain | GetSnapshot


class TopLogprob(msgspec.Struct, frozen=True, array_like=True):
    """An alternative at one position."""

    token_id: int
    logprob: float


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Logprob of one emitted (or prompt) token, and the best alternatives, best first.

    logprob is None only for the first prompt token, which nothing precedes.
    """

    token_id: int
    logprob: float | None
    top: tuple[TopLogprob, ...] = ()


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Of one sequence, in seconds of the engine's monotonic clock, relative to its arrival."""

    queued: float
    first_token: float | None
    finished: float
    adapter_load: float = 0.0
    preemptions: int = 0


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """Verified tokens of one sequence, in order; logprobs has one entry a token if asked for.

    The stop token that ends a sequence is not among them: `Finished` names it."""

    sequence_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Last event of a sequence; everything it held is free.

    stop_token: the id that ended it when reason is `stop`.  completion_tokens counts it.
    error: what went wrong when reason is `error`.
    """

    sequence_id: str
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    timings: Timings
    cached_tokens: int = 0
    stop_token: int | None = None
    error_code: str | None = None
    error: str | None = None


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The sequence was never queued. `code` is one of the public error codes
    (`queue_full`, `context_length_exceeded`, `invalid_adapter`, `engine_unavailable`,
    `invalid_request`)."""

    sequence_id: str
    code: str
    message: str
    retry_after: float | None = None


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """What this engine is."""

    version: int
    base_digest: str
    max_model_len: int
    max_prompt_tokens: int
    capabilities: tuple["Capability", ...]


class Capability(msgspec.Struct, frozen=True):
    """One op or optional speed-up: which implementation runs, how often it ran, how often it
    fell back and why."""

    name: str
    implementation: str
    engaged: int
    fallbacks: dict[str, int] = msgspec.field(default_factory=dict)


class AdapterResidency(msgspec.Struct, frozen=True):
    """A revision on the device or on its way there."""

    digest: str
    state: Literal["loading", "resident", "draining"]
    pinned_by: int
    pages: int
    bytes: int
    requests: int


class Status(msgspec.Struct, frozen=True, tag="status", kw_only=True):
    """Heartbeat, sent by the step loop itself, so a hung step is a silent engine."""

    time: float
    steps: int
    running: int
    waiting: int
    queue_limit: int
    blocks_free: int
    blocks_total: int
    pages_free: dict[str, int]
    pages_total: dict[str, int]
    resident_adapters: int
    step_seconds_total: float
    prompt_tokens_total: int
    generated_tokens_total: int
    preemptions_total: int
    draining: bool = False
    quarantined: tuple[str, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot", kw_only=True):
    """Everything held right now, for operators and for leak checks."""

    status: Status
    sequences: tuple[str, ...]
    adapters: tuple[AdapterResidency, ...]
    capabilities: tuple[Capability, ...]


Event = Tokens | Finished | Refused | Welcome | Status | Snapshot


class Events(msgspec.Struct, frozen=True):
    """One frame from the engine: all events of a step for one API process."""

    events: tuple[Event, ...]
