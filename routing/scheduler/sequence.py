"""State of one sequence between its arrival and its last token."""

from enum import StrEnum

from polyloom.routing.request import GenerationRequest


class SequenceStatus(StrEnum):
    """Where a sequence is. A preempted one is WAITING again."""

    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """One sequence: what it asked for, what it has, how far its KV is.

    tokens: prompt, then output; what a recompute would run.
    computed: leading tokens whose KV is in the cache.
    held: it may not start yet, whatever its adapter's state: its grammar is being compiled.
    charged: leading tokens that its tenant has been charged for.
    arrival, admitted, first_token_at, load_started: monotonic seconds; None while it has not
        happened.
    no_room_since, no_blocks_since: since when it has found no room for its adapter, and no blocks.
    """

    __slots__ = (
        "adapter_load",
        "admitted",
        "arrival",
        "charged",
        "computed",
        "first_token_at",
        "held",
        "load_started",
        "no_blocks_since",
        "no_room_since",
        "pinned",
        "preemptions",
        "prompt_len",
        "prompt_logprobs_sent",
        "request",
        "sequence_id",
        "status",
        "tokens",
    )

    def __init__(self, request: GenerationRequest, arrival: float) -> None:
        self.request = request
        self.sequence_id = request.sequence_id
        self.tokens = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.computed = 0
        self.charged = 0
        self.status = SequenceStatus.WAITING
        self.arrival = arrival
        self.admitted: float | None = None
        self.first_token_at: float | None = None
        self.load_started: float | None = None
        self.no_room_since: float | None = None
        self.no_blocks_since: float | None = None
        self.adapter_load = 0.0
        self.pinned = False
        self.held = False
        self.preemptions = 0
        self.prompt_logprobs_sent = 0

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def weight(self) -> float:
        """Of its tenant against others."""
        return self.request.weight

    @property
    def adapter_digest(self) -> str | None:
        return self.request.combination.adapter_digest

    @property
    def pending(self) -> int:
        """Tokens that must run before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def remaining(self) -> int:
        """Tokens that will still run for it if it generates all it may."""
        return self.pending + self.request.sampling.max_tokens - self.output_len

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def decoding(self) -> bool:
        """Only its newest sampled token is left to run."""
        return self.pending == 1 and self.output_len > 0

    @property
    def reusable(self) -> int:
        """Leading tokens that need not run here if their KV is cached: after them comes the first
        whose logits something is read from."""
        wants_prompt = self.request.sampling.prompt_logprobs is not None
        if wants_prompt and self.prompt_logprobs_sent < self.prompt_len:
            return max(0, self.prompt_logprobs_sent - 1)
        return len(self.tokens) - 1

    def forget_cache(self) -> None:
        """Its blocks are gone: everything it has runs again, generated tokens included."""
        self.computed = 0
        self.preemptions += 1
