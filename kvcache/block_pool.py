"""Which blocks of the paged cache are free, and how many holders each of the others has."""

from collections.abc import Iterable

from polyloom.kvcache.errors import BlockAccountingError, OutOfBlocksError


class BlockPool:
    """Blocks `0 … num_blocks - 1`, counted by holder.

    A block that nobody holds is free, unless its content is kept for later: then it is idle, until
    it is shared again or discarded. Every method takes or gives all of what it was asked for, or
    raises and changes nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self._holders = [0] * num_blocks
        self._kept: set[int] = set()
        self._num_idle = 0
        # A stack: the block freed last is the likeliest to be in the processor's cache.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated; idle ones are not among them."""
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds and whose content is kept."""
        return self._num_idle

    @property
    def num_kept(self) -> int:
        """Blocks whose content is kept, held or idle."""
        return len(self._kept)

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

    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of `blocks`. Raises BlockAccountingError if one is free."""
        shared = list(blocks)
        for block in shared:
            if self._holders[block] == 0 and block not in self._kept:
                raise BlockAccountingError(f"block {block} is shared but it is free")
        for block in shared:
            self._num_idle -= self._holders[block] == 0
            self._holders[block] += 1

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
                if block in self._kept:
                    self._num_idle += 1
                else:
                    self._free.append(block)

    def keep(self, block: int) -> None:
        """Keep the content of a held block when its last holder goes."""
        if self._holders[block] == 0 or block in self._kept:
            raise BlockAccountingError(f"block {block} is kept twice, or without a holder")
        self._kept.add(block)

    def discard(self, block: int) -> None:
        """Keep the content no longer: the block is free now, or when its last holder goes."""
        if block not in self._kept:
            raise BlockAccountingError(f"block {block} is discarded but it is not kept")
        self._kept.remove(block)
        if self._holders[block] == 0:
            self._num_idle -= 1
            self._free.append(block)

    def check(self) -> None:
        """Raise BlockAccountingError unless each block is either free, once, or held, or idle."""
        unheld = {block for block, holders in enumerate(self._holders) if holders == 0}
        if len(set(self._free)) != len(self._free):
            raise BlockAccountingError("a block is in the free list twice")
        idle = unheld & self._kept
        if unheld - idle != set(self._free):
            lost = (unheld - idle) ^ set(self._free)
            raise BlockAccountingError(f"blocks lost or given out: {lost}")
        if len(idle) != self._num_idle:
            raise BlockAccountingError(f"{len(idle)} blocks are idle, {self._num_idle} counted")
