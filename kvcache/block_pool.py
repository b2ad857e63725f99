"""Which blocks of the paged cache are free, and how many holders each of the others has."""

from collections.abc import Iterable

from polyloom.kvcache.errors import BlockAccountingError, OutOfBlocksError


class BlockPool:
    """Blocks `0 … num_blocks - 1`, counted by holder; a block is free when nobody holds it.

    Every method takes or gives all of what it was asked for, or raises and changes nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self._holders = [0] * num_blocks
        # A stack: the block freed last is the likeliest to be in the processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holders(self, block: int) -> int:
        """How many hold `block`."""
        return self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one holder. Raises OutOfBlocksError."""
        if count > len(self._free):
            raise OutOfBlocksError(count, len(self._free))
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give up one hold on each of `blocks`. Raises BlockAccountingError if one is not held."""
        released = list(blocks)
        for block in released:
            if not 0 <= block < len(self._holders) or self._holders[block] == 0:
                raise BlockAccountingError(f"block {block} is freed but nobody holds it")
        if len(set(released)) != len(released):
            raise BlockAccountingError(f"a block is freed twice at once: {released}")
        for block in released:
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)

    def check(self) -> None:
        """Raise BlockAccountingError unless each block is either free, once, or held."""
        unheld = {block for block, holders in enumerate(self._holders) if holders == 0}
        if len(set(self._free)) != len(self._free):
            raise BlockAccountingError("a block is in the free list twice")
        if unheld != set(self._free):
            raise BlockAccountingError(f"blocks lost or given out: {unheld ^ set(self._free)}")
