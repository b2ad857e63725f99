"""Which blocks hold each sequence's context."""

from collections.abc import Sequence

from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.errors import BlockAccountingError, UnknownSequenceError


class KVCacheManager:
    """Block tables of the running sequences over one pool.

    A sequence exists here from its first `reserve` to its `free`.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._tables: dict[str, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    def __contains__(self, sequence_id: str) -> bool:
        """Whether the sequence holds blocks, and so must be freed."""
        return sequence_id in self._tables

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one sequence fill."""
        return -(-num_tokens // self._block_size)

    def reserve(self, sequence_id: str, num_tokens: int) -> None:
        """Make room for the sequence's first `num_tokens` tokens, those it has already included.

        Raises OutOfBlocksError with nothing taken; a sequence new to the manager stays unknown.
        """
        table = self._tables.get(sequence_id, [])
        missing = self.blocks_for(num_tokens) - len(table)
        if missing > 0:
            table = table + self._pool.allocate(missing)
        self._tables[sequence_id] = table

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
        """Keep only what the first `num_tokens` tokens need: the rest was drafted and rejected."""
        table = self._table(sequence_id)
        kept = self.blocks_for(num_tokens)
        self._pool.free(table[kept:])
        del table[kept:]

    def free(self, sequence_id: str) -> None:
        """Give up every block of the sequence."""
        self._pool.free(self._table(sequence_id))
        del self._tables[sequence_id]

    def check_idle(self) -> None:
        """Raise BlockAccountingError unless no sequence is left and every block is free."""
        self._pool.check()
        if self._tables:
            raise BlockAccountingError(f"sequences left: {sorted(self._tables)}")
        if self._pool.num_free != self._pool.num_blocks:
            lost = self._pool.num_blocks - self._pool.num_free
            raise BlockAccountingError(f"{lost} blocks are held by no sequence")

    def _table(self, sequence_id: str) -> list[int]:
        try:
            return self._tables[sequence_id]
        except KeyError:
            raise UnknownSequenceError(sequence_id) from None
