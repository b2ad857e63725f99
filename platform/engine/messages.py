"""What the API process and the engine process say to each other: msgspec structs over a socket.

Every frame is one msgpack-encoded `Command` (API → engine) or `Event` (engine → API). A peer first
says `Hello`; another version is refused. Several API processes may talk to one engine: events
of a sequence go to the process that submitted it, statuses go to all.
"""

from typing import Literal

import msgspec

from polyloom.routing.request import CacheOwner, GenerationRequest

PROTOCOL_VERSION = 3

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


class ReleasePrefix(msgspec.Struct, frozen=True, tag="release_prefix"):
    """Unpin the blocks held under this id; they stay cached until they are evicted."""

    hold: str


InvalidationCause = Literal[
    "revision_retired",
    "tenant_purged",
    "share_revoked",
    "base_changed",
    "template_changed",
    "operator",
]


class Invalidate(msgspec.Struct, frozen=True, kw_only=True, tag="invalidate"):
    """Make unreachable, and free unless a running sequence uses them, the cached blocks of every
    namespace that agrees with all the fields given; held prefixes of them are released."""

    cause: InvalidationCause
    owner: CacheOwner | None = None
    base_digest: str | None = None
    adapter_digest: str | None = None
    template_digest: str | None = None


class GetCacheReport(msgspec.Struct, frozen=True, tag="get_cache_report"):
    """Ask for `CacheReport`."""


class GetSpeculationReport(msgspec.Struct, frozen=True, tag="get_speculation_report"):
    """Ask for `SpeculationReport`."""


Command = (
    Hello
    | Submit
    | Abort
    | Retire
    | Drain
    | GetSnapshot
    | ReleasePrefix
    | Invalidate
    | GetCacheReport
    | GetSpeculationReport
)


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


MissReason = Literal[
    "first",
    "evicted",
    "invalidated",
    "tokens",
    "revision",
    "template",
    "tokenizer",
    "tools",
    "salt",
]


class CacheMiss(msgspec.Struct, frozen=True):
    """Why a prompt's whole blocks were not all found: what sets it apart from the most similar
    prompt that its owner sent lately.

    reason: the field of the namespace that differs; `tokens` when only the prompts do; `evicted` or
    `invalidated` when nothing does; `first` when there is no such prompt.
    position: of the first differing token, for `tokens`.  before, expected, found: up to 16 token
    ids up to there, and from there on in the earlier prompt and in this one.
    """

    reason: MissReason
    position: int | None = None
    before: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    found: tuple[int, ...] = ()


class CacheOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefix cache did for one sequence, in tokens of its prompt.

    eligible: of whole blocks, the last token excluded.  cached: reused, partial last block
    included.  bytes: KV bytes reused.  saved: seconds of prefill by the engine's measured cost.
    """

    eligible: int
    cached: int
    bytes: int
    saved: float
    miss: CacheMiss | None = None


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """Verified tokens of one sequence, in order; logprobs has one entry a token if asked for.

    The stop token that ends a sequence is not among them: `Finished` names it."""

    sequence_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """Last event of a sequence; everything it held is free.

    stop_token: the id that ended it when reason is `stop`, None when its grammar was complete.
    completion_tokens counts it.
    error: what went wrong when reason is `error`.
    cache: None if the request shares no blocks.
    accepted_tokens, rejected_tokens: drafted ones that were the target's own, and that were not.
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
    cache: CacheOutcome | None = None
    accepted_tokens: int = 0
    rejected_tokens: int = 0


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
    fell back and why.

    why: this implementation was chosen.  kernels: compiled for it.  graph_buckets: tokens of a step
    that captured graphs exist for.  compile_seconds: spent on those kernels or graphs.
    """

    name: str
    implementation: str
    engaged: int
    fallbacks: dict[str, int] = msgspec.field(default_factory=dict)
    why: str = ""
    kernels: tuple[str, ...] = ()
    graph_buckets: tuple[int, ...] = ()
    compile_seconds: float = 0.0


class AdapterResidency(msgspec.Struct, frozen=True):
    """A revision on the device or on its way there."""

    digest: str
    state: Literal["loading", "resident", "draining"]
    pinned_by: int
    pages: int
    bytes: int
    requests: int


class Status(msgspec.Struct, frozen=True, tag="status", kw_only=True):
    """Heartbeat, sent by the step loop itself, so a hung step is a silent engine.

    pauses_total: turns that a running sequence gave to a tenant below its share.
    chunk_*: pieces that prompts are run in: tokens of the last one that was cut, how many there
    were, how often their size changed, seconds of steps' fixed costs that cutting added at most.
    """

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
    pauses_total: int = 0
    chunk_tokens: int = 0
    chunks_total: int = 0
    chunk_changes_total: int = 0
    chunk_overhead_seconds_total: float = 0.0
    draining: bool = False
    quarantined: tuple[str, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot", kw_only=True):
    """Everything held right now, for operators and for leak checks."""

    status: Status
    sequences: tuple[str, ...]
    adapters: tuple[AdapterResidency, ...]
    capabilities: tuple[Capability, ...]


class NamespaceCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Of all namespaces of one (owner, base, revision), since this engine process started.

    eligible, hits: requests with at least one whole block, and those that reused one.
    tokens_reused, bytes_reused, saved: as in `CacheOutcome`.  evictions: blocks, for capacity.
    invalidations: blocks by cause.  misses: requests by reason.  blocks, held_blocks: cached now,
    and those of them that a held prefix pins.
    """

    owner: CacheOwner
    base_digest: str
    adapter_digest: str | None
    eligible: int
    hits: int
    tokens_reused: int
    bytes_reused: int
    saved: float
    evictions: int
    invalidations: dict[InvalidationCause, int]
    misses: dict[MissReason, int]
    blocks: int
    held_blocks: int


class HotPrefix(msgspec.Struct, frozen=True):
    """A cached chain's block hash (its namespace is part of it) and the tokens up to its end."""

    block_hash: str
    num_tokens: int


class CacheReport(msgspec.Struct, frozen=True, kw_only=True, tag="cache_report"):
    """The prefix cache of one engine process.

    boot: random id of the process: counters of another boot began at zero.  cross_namespace_hits:
    the isolation self-check, blocks found under a namespace other than their own; always 0.
    """

    boot: str
    namespaces: tuple[NamespaceCounters, ...]
    hot: tuple[HotPrefix, ...]
    holds: tuple[str, ...]
    checked_hits: int
    cross_namespace_hits: int


class SpeculationLine(msgspec.Struct, frozen=True, kw_only=True):
    """What drafts brought and cost for one kind of request, since this engine process started.

    revision: digest of an adapter's revision, None for the base alone.  domain: a request's label,
    or its route.  temperature: `greedy` (0), `low` (to 0.5), `medium` (to 1) or `high`.
    steps, steps_at_zero: of its sequences, with a draft of this drafter and without.
    drafted, accepted: tokens.  proposals_by_length[i]: verified drafts of i tokens;
    accepted_by_position[i]: accepted tokens at place i of their draft; accepted_lengths[i]: drafts
    of which i tokens were accepted.  draft_seconds: in the drafter.  verify_seconds: what drafted
    rows added to steps; decode_seconds: the rest of them, the sequences' shares.
    rejected_seconds: of drafting and verifying what was rejected.  margin: by how much, as a share,
    the last draft's step was expected to beat one without drafts.  decision: the last length.
    """

    revision: str | None
    drafter: str
    domain: str
    temperature: Literal["greedy", "low", "medium", "high"]
    steps: int
    steps_at_zero: int
    drafted: int
    accepted: int
    proposals_by_length: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    accepted_lengths: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    decode_seconds: float
    rejected_seconds: float
    margin: float
    decision: int


class SpeculationReport(msgspec.Struct, frozen=True, kw_only=True, tag="speculation_report"):
    """Speculation of one engine process.

    controller_seconds: spent choosing drafts and learning from them, drafters not included.
    step_seconds: of the steps in which drafts were possible, drafting and choosing included.
    """

    drafters: tuple[str, ...]
    lines: tuple[SpeculationLine, ...]
    controller_seconds: float
    step_seconds: float


Event = Tokens | Finished | Refused | Welcome | Status | Snapshot | CacheReport | SpeculationReport


class Events(msgspec.Struct, frozen=True):
    """One frame from the engine: all events of a step for one API process."""

    events: tuple[Event, ...]
