"""What a prefix cache did, counted by whose it is and for which revision."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from polyloom.kvcache.namespace import Namespace, OwnerKind

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
InvalidationCause = Literal[
    "revision_retired",
    "tenant_purged",
    "share_revoked",
    "base_changed",
    "template_changed",
    "operator",
]


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a prompt's whole blocks were not all found, beside the most similar earlier prompt.

    position: of the first differing token when reason is `tokens`.  before, expected, found: token
    ids up to there, and from there on in the earlier prompt and in this one.
    """

    reason: MissReason
    position: int | None = None
    before: tuple[int, ...] = ()
    expected: tuple[int, ...] = ()
    found: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reuse:
    """What the cache did for one prompt, in tokens; bytes of KV; saved: seconds of prefill.

    eligible: of whole blocks, without the last token.  cached: reused, partial block included.
    blocks: whole ones reused.
    """

    eligible: int
    cached: int
    blocks: int
    bytes: int
    saved: float
    miss: Miss | None


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Namespaces that are counted together; a client's salt makes no new one."""

    owner_kind: OwnerKind
    owner_name: str
    base_digest: str
    adapter_digest: str | None

    @classmethod
    def of(cls, namespace: Namespace) -> "GroupKey":
        return cls(
            namespace.owner_kind,
            namespace.owner_name,
            namespace.base_digest,
            namespace.adapter_digest,
        )


@dataclass(slots=True)
class GroupCounters:
    """Of one group. evictions, invalidations, blocks, held_blocks: blocks; the others requests,
    tokens, bytes and seconds of the prompts that had a whole block to reuse."""

    eligible: int = 0
    hits: int = 0
    tokens_reused: int = 0
    bytes_reused: int = 0
    saved: float = 0.0
    evictions: int = 0
    invalidations: Counter[InvalidationCause] = field(default_factory=Counter)
    misses: Counter[MissReason] = field(default_factory=Counter)
    blocks: int = 0
    held_blocks: int = 0

    def count(self, reuse: Reuse) -> None:
        """Count one prompt."""
        self.tokens_reused += reuse.cached
        self.bytes_reused += reuse.bytes
        self.saved += reuse.saved
        if reuse.eligible:
            self.eligible += 1
            self.hits += reuse.blocks > 0
        if reuse.miss is not None:
            self.misses[reuse.miss.reason] += 1


class PrefillCost:
    """Seconds that a prompt token costs, measured over recent steps."""

    _DECAY = 0.98  # a step: about the last fifty count

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def per_token(self) -> float:
        """0 before the first step."""
        return self._seconds / self._tokens if self._tokens else 0.0

    def ran(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` tokens, most of them of prompts, took `seconds`."""
        self._tokens = self._tokens * self._DECAY + num_tokens
        self._seconds = self._seconds * self._DECAY + seconds
