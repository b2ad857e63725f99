"""The prefix cache in the engine's words: requests in, outcomes and reports out."""

import itertools
import secrets

from polyloom.kvcache.errors import HoldTooLargeError
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.kvcache.namespace import Namespace, block_hashes
from polyloom.kvcache.prefix_cache import PrefixCache
from polyloom.kvcache.prefix_counters import GroupCounters, GroupKey, Reuse
from polyloom.kvcache.prefix_index import CachedBlock, PrefixIndex
from polyloom.platform.engine.admission import INVALID_REQUEST
from polyloom.platform.engine.messages import (
    CacheMiss,
    CacheOutcome,
    CacheReport,
    HotPrefix,
    Invalidate,
    NamespaceCounters,
    Refused,
)
from polyloom.routing.request import CacheOwner, CacheScope, GenerationRequest

CAPABILITY = "prefix_cache"
MAX_HOT = 1024
HOT_BLOCKS = 8
"""Of a chain without branches, every so-manyth block is reported."""


def namespace(request: GenerationRequest, scope: CacheScope, kv_dtype: str) -> Namespace:
    """Where the request's blocks come from and go to."""
    combination = request.combination
    return Namespace(
        owner_kind=scope.owner.kind,
        owner_name=scope.owner.name,
        base_digest=combination.base_digest,
        adapter_digest=combination.adapter_digest,
        tokenizer_digest=scope.tokenizer_digest,
        template_digest=combination.template_digest,
        tool_schema_digest=scope.tool_schema_digest,
        salt=scope.salt,
        kv_dtype=kv_dtype,
    )


def prompt_chain(request: GenerationRequest, kv_dtype: str, block_size: int) -> tuple[str, ...]:
    """Hashes of the prompt's whole blocks as `CacheReport.hot` names them; none if it shares
    nothing."""
    if request.cache is None:
        return ()
    root = namespace(request, request.cache, kv_dtype).root()
    return tuple(h.hex() for h in block_hashes(root, request.prompt, block_size))


class EnginePrefixCache:
    """Opens and closes sequences in one cache, or in none: then nothing is ever reused."""

    def __init__(
        self, cache: PrefixCache | None, kv_dtype: str, capabilities: Capabilities
    ) -> None:
        self._cache = cache
        self._kv_dtype = kv_dtype
        self._ledger = capabilities.register(CAPABILITY, "off" if cache is None else "on")
        self._boot = secrets.token_hex(8)

    def refusal(self, request: GenerationRequest) -> Refused | None:
        """Why the request's prefix cannot be held; None if it can, or is not to be."""
        if request.hold is None:
            return None
        if self._cache is None or request.cache is None:
            what = "the prefix cache is off" if self._cache is None else "it shares no blocks"
            message = f"hold {request.hold!r}: {what}"
            return Refused(request.sequence_id, INVALID_REQUEST, message)
        try:
            self._cache.check_hold(request.hold, len(request.prompt))
        except HoldTooLargeError as error:
            return Refused(request.sequence_id, INVALID_REQUEST, str(error))
        return None

    def open(self, request: GenerationRequest) -> None:
        """Let a queued sequence share blocks, if it asked for it."""
        if self._cache is not None and request.cache is not None:
            where = namespace(request, request.cache, self._kv_dtype)
            self._cache.open(request.sequence_id, where, request.prompt, request.hold)

    def close(self, sequence_id: str) -> CacheOutcome | None:
        """A sequence has ended, its blocks are free; what the cache did for it."""
        if self._cache is None or sequence_id not in self._cache:
            return None
        reuse = self._cache.close(sequence_id)
        if reuse is None:
            return None
        self._ledger.engaged += reuse.cached > 0
        return _outcome(reuse)

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """A step that ran mostly prompts took so long."""
        if self._cache is not None:
            self._cache.prefill_cost.ran(num_tokens, seconds)

    def invalidate(self, command: Invalidate) -> None:
        """Make the blocks of all namespaces that agree with the command's fields unreachable."""
        wanted = {
            "base_digest": command.base_digest,
            "adapter_digest": command.adapter_digest,
            "template_digest": command.template_digest,
        }
        if command.owner is not None:
            wanted |= {"owner_kind": command.owner.kind, "owner_name": command.owner.name}

        def agrees(candidate: Namespace) -> bool:
            return all(
                value is None or getattr(candidate, name) == value for name, value in wanted.items()
            )

        if self._cache is not None:
            self._cache.invalidate(agrees, command.cause)

    def release(self, hold: str) -> None:
        """Unpin a held prefix."""
        if self._cache is not None:
            self._cache.release_hold(hold)

    def report(self) -> CacheReport:
        """Counters, held prefixes, and what is worth knowing to whoever places requests."""
        if self._cache is None:
            return CacheReport(
                boot=self._boot,
                namespaces=(),
                hot=(),
                holds=(),
                checked_hits=0,
                cross_namespace_hits=0,
            )
        index = self._cache.index
        return CacheReport(
            boot=self._boot,
            namespaces=tuple(_counters(key, group) for key, group in index.groups.items()),
            hot=_hot(index),
            holds=self._cache.holds,
            checked_hits=index.checked_hits,
            cross_namespace_hits=index.cross_namespace_hits,
        )


def _hot(index: PrefixIndex) -> tuple[HotPrefix, ...]:
    """The most recently used ends, branches and regular stations of the cached chains."""
    recent = itertools.islice(index.by_use(), MAX_HOT * HOT_BLOCKS)
    stations = itertools.islice(filter(_is_station, recent), MAX_HOT)
    return tuple(HotPrefix(node.hash.hex(), node.end) for node in stations)


def _is_station(node: CachedBlock) -> bool:
    return len(node.children) != 1 or node.end % (HOT_BLOCKS * len(node.tokens)) == 0


def _outcome(reuse: Reuse) -> CacheOutcome:
    miss = reuse.miss
    return CacheOutcome(
        eligible=reuse.eligible,
        cached=reuse.cached,
        bytes=reuse.bytes,
        saved=reuse.saved,
        miss=None
        if miss is None
        else CacheMiss(miss.reason, miss.position, miss.before, miss.expected, miss.found),
    )


def _counters(key: GroupKey, group: GroupCounters) -> NamespaceCounters:
    return NamespaceCounters(
        owner=CacheOwner(key.owner_kind, key.owner_name),
        base_digest=key.base_digest,
        adapter_digest=key.adapter_digest,
        eligible=group.eligible,
        hits=group.hits,
        tokens_reused=group.tokens_reused,
        bytes_reused=group.bytes_reused,
        saved=group.saved,
        evictions=group.evictions,
        invalidations=dict(group.invalidations),
        misses=dict(group.misses),
        blocks=group.blocks,
        held_blocks=group.held_blocks,
    )
