"""Which blocks hold each sequence's context."""

from collections.abc import Iterable, Sequence

from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.errors import (
    BlockAccountingError,
    OutOfBlocksError,
    UnknownSequenceError,
)
from polyloom.kvcache.prefix_cache import Match, PrefixCache


class KVCacheManager:
    """Block tables of the running sequences over one pool.

    A sequence exists here from its first `reserve`, or its `admit`, to its `free`. One that is open
    in the prefix cache shares blocks with others; its table then begins with blocks that it must
    not write to: whatever it computes lies behind them.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, prefix_cache: PrefixCache | None = None
    ) -> None:
        """prefix_cache: over the same pool; None: every sequence computes all of its tokens."""
        self._pool = pool
        self._block_size = block_size
        self._prefix_cache = prefix_cache
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a sequence can get: free ones, and cached ones that nobody holds."""
        return self._pool.num_free + self._pool.num_idle

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    def __contains__(self, sequence_id: str) -> bool:
        """Whether the sequence holds blocks, and so must be freed."""
        return sequence_id in self._tables

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one sequence fill."""
        return -(-num_tokens // self._block_size)

    def admit(self, sequence_id: str, tokens: Sequence[int], reusable: int) -> int:
        """Make room for all `tokens` of a sequence without blocks; how many of them are there.

        K and V of those, at most the first `reusable`, come from the prefix cache. Raises
        OutOfBlocksError with nothing taken.
        """
        cache = self._prefix_cache
        if cache is None or sequence_id not in cache:
            self.reserve(sequence_id, len(tokens))
            return 0
        match = cache.match(sequence_id, tokens, reusable)
        try:
            return self._adopt(cache, sequence_id, len(tokens), match, reusable)
        except OutOfBlocksError:
            if match.partial is None:
                raise
        # The block to copy from may be the one that is missing.
        return self._adopt(cache, sequence_id, len(tokens), Match(match.chain), reusable)

    def awaits(
        self, sequence_id: str, tokens: Sequence[int], reusable: int, running: Iterable[str]
    ) -> bool:
        """Whether a sequence without blocks would find much more of its first `reusable` tokens if
        it were admitted after a step of the `running` ones, which have not run their prompts."""
        cache = self._prefix_cache
        if cache is None or sequence_id not in cache:
            return False
        return cache.awaits(sequence_id, tokens, reusable, running)

    def reserve(self, sequence_id: str, num_tokens: int) -> None:
        """Make room for the sequence's first `num_tokens` tokens, those it has already included.

        Raises OutOfBlocksError with nothing taken; a sequence new to the manager stays unknown.
        """
        table = self._tables.get(sequence_id, [])
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > 0:
            table = table + self._allocate(missing)
        self._tables[sequence_id] = table

    def commit(self, sequence_id: str, tokens: Sequence[int], num_tokens: int) -> None:
        """The first `num_tokens` of `tokens` are verified and computed: others may reuse them."""
        cache = self._prefix_cache
        if cache is not None and sequence_id in cache:
            cache.commit(sequence_id, self._table(sequence_id), tokens, num_tokens)

    def blocks(self, sequence_id: str) -> Sequence[int]:
        """The sequence's block table: block `i` holds tokens `[i, i + 1) * block_size`."""
        return self._table(sequence_id)

    def slot(self, sequence_id: str, position: int) -> int:
        """Where token `position` of the sequence lies: `block * block_size + offset`."""
        index, offset = divmod(position, self._block_size)
        table = self._table(sequence_id)
        if not 0 <= index < len(table):
            raise BlockAccountingError(
                f"position {position} of sequence {sequence_id} is beyond its {len(table)} blocks"
            )
        return table[index] * self._block_size + offset

    def truncate(self, sequence_id: str, num_tokens: int) -> None:
        """Keep only what the first `num_tokens` tokens need: the rest was drafted and rejected.

        Raises BlockAccountingError if some of the rest was committed.
        """
        table, cache = self._table(sequence_id), self._prefix_cache
        if cache is not None and sequence_id in cache:
            shared = cache.shared_tokens(sequence_id)
            if num_tokens < shared:
                raise BlockAccountingError(
                    f"sequence {sequence_id} shares its first {shared} tokens, {num_tokens} kept"
                )
        kept = self.blocks_for(num_tokens)
        self._pool.free(table[kept:])
        del table[kept:]

    def free(self, sequence_id: str) -> None:
        """Give up every block of the sequence; those that are cached stay, for others, while
        there is room."""
        table = self._table(sequence_id)
        self._pool.free(table)
        del self._tables[sequence_id]
        if self._prefix_cache is not None and sequence_id in self._prefix_cache:
            self._prefix_cache.freed(sequence_id, table)

    def check_idle(self) -> None:
        """Raise BlockAccountingError unless no sequence is left and every block is free, or cached
        and at most held by prefixes that are to stay."""
        self._pool.check()
        if self._tables:
            raise BlockAccountingError(f"sequences left: {sorted(self._tables)}")
        pinned = 0
        if self._prefix_cache is not None:
            self._prefix_cache.check()
            pinned = self._prefix_cache.num_held_blocks
        lost = self._pool.num_blocks - self.num_free_blocks - pinned
        if lost:
            raise BlockAccountingError(f"{lost} blocks are held by no sequence")

    def _adopt(
        self, cache: PrefixCache, sequence_id: str, num_tokens: int, match: Match, reusable: int
    ) -> int:
        """Take what matched, and fresh blocks for the rest of `num_tokens`; as `admit`."""
        partial = [] if match.partial is None else [match.partial.block]
        self._pool.share(match.blocks + partial)
        try:
            fresh = self._allocate(self.blocks_for(num_tokens) - len(match.chain))
        except OutOfBlocksError:
            self._pool.free(match.blocks + partial)
            raise
        self._tables[sequence_id] = match.blocks + fresh
        cache.reuse(sequence_id, match, self._tables[sequence_id], reusable)
        self._pool.free(partial)
        cache.index.released(partial)
        return match.num_tokens

    def _allocate(self, count: int) -> list[int]:
        """Fresh blocks; cached ones make room, unless even all of them were too few."""
        if count > self.num_free_blocks:
            raise OutOfBlocksError(count, self.num_free_blocks)
        shortage = count - self._pool.num_free
        if shortage > 0 and self._prefix_cache is not None:
            self._prefix_cache.index.evict(shortage)
        return self._pool.allocate(count)

    def _table(self, sequence_id: str) -> list[int]:
        try:
            return self._tables[sequence_id]
        except KeyError:
            raise UnknownSequenceError(sequence_id) from None
