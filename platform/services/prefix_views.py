"""What the services of prefix caches hand out: immutable values."""

from datetime import datetime

import msgspec

from polyloom.platform.engine.messages import InvalidationCause, MissReason
from polyloom.routing.request import CacheOwner


class CacheCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What prefix caches gave, over all engine processes there were.

    eligible_requests: with at least one whole block in the prompt.  exact_hits: those that reused
    one.  hit_rate: hits of the eligible, None without any.  evictions, invalidations: blocks.
    misses: requests by reason.  cached_blocks, held_blocks: now, in the engines that answer.
    """

    eligible_requests: int
    exact_hits: int
    hit_rate: float | None
    tokens_reused: int
    bytes_reused: int
    prefill_seconds_saved: float
    evictions: int
    invalidations: dict[InvalidationCause, int]
    misses: dict[MissReason, int]
    cached_blocks: int
    held_blocks: int


class NamespaceCounts(msgspec.Struct, frozen=True, kw_only=True):
    """All caches of one owner on one base and one revision. revisions: the names (`name@number`)
    that the adapter's content has; none for the base."""

    owner: CacheOwner
    base_digest: str
    adapter_digest: str | None
    revisions: tuple[str, ...]
    counts: CacheCounts


class IsolationCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The engines' self-check, since each began: hits that were compared with their namespace, and
    those of another namespace, which must be 0. A tenant is not told how many there were of all."""

    checked_hits: int | None
    cross_namespace_hits: int


class InvalidationView(msgspec.Struct, frozen=True, kw_only=True):
    """Cached blocks that became unreachable; None stands for any. blocks_freed: in the engines of
    the server that was asked, None where that is not known."""

    id: int
    cause: InvalidationCause
    owner: CacheOwner | None
    base_digest: str | None
    adapter_digest: str | None
    template_digest: str | None
    author: str
    blocks_freed: int | None
    created_at: datetime


class CacheAccount(msgspec.Struct, frozen=True, kw_only=True):
    """A report on prefix caches. engines: that answered."""

    total: CacheCounts
    namespaces: tuple[NamespaceCounts, ...]
    invalidations: tuple[InvalidationView, ...]
    isolation: IsolationCheck
    engines: int


class HoldView(msgspec.Struct, frozen=True, kw_only=True):
    """A held prefix. tokens: of the prefix, 0 before it was first planned.  engines: that hold it
    now, of `engines_total`.  failure: why it is not warm."""

    name: str
    model: str
    tokens: int
    engines: int
    engines_total: int
    failure: str | None
    author: str
    created_at: datetime
