"""No block is lost, given out twice or freed twice, whatever the engine does."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.errors import (
    BlockAccountingError,
    OutOfBlocksError,
    UnknownSequenceError,
)
from polyloom.kvcache.manager import KVCacheManager

BLOCK_SIZE, NUM_BLOCKS = 4, 12


class Books(RuleBasedStateMachine):
    """The manager against a model that knows only how many tokens each sequence has."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.manager = KVCacheManager(self.pool, BLOCK_SIZE)
        self.tokens: dict[str, int] = {}

    def held(self, sequence: str) -> int:
        return -(-self.tokens.get(sequence, 0) // BLOCK_SIZE)

    @rule(sequence=st.sampled_from("abcdef"), more=st.integers(0, 20))
    def reserve(self, sequence: str, more: int) -> None:
        total = self.tokens.get(sequence, 0) + more
        known = list(self.manager.blocks(sequence)) if sequence in self.manager else []
        missing = -(-total // BLOCK_SIZE) - self.held(sequence)
        if missing > self.pool.num_free:
            free = self.pool.num_free
            with pytest.raises(OutOfBlocksError) as refused:
                self.manager.reserve(sequence, total)
            assert (refused.value.asked, refused.value.free) == (missing, free)
            assert self.pool.num_free == free
            assert (sequence in self.manager) == (sequence in self.tokens)
        else:
            self.manager.reserve(sequence, total)
            self.tokens[sequence] = total
            assert list(self.manager.blocks(sequence))[: len(known)] == known

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.tokens)))
        kept = data.draw(st.integers(0, self.tokens[sequence]))
        before = list(self.manager.blocks(sequence))
        self.manager.truncate(sequence, kept)
        self.tokens[sequence] = kept
        assert list(self.manager.blocks(sequence)) == before[: self.held(sequence)]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.tokens)))
        self.manager.free(sequence)
        del self.tokens[sequence]
        assert sequence not in self.manager

    @invariant()
    def no_two_tokens_share_a_slot(self) -> None:
        self.pool.check()
        slots = [
            self.manager.slot(sequence, position)
            for sequence, count in self.tokens.items()
            for position in range(count)
        ]
        assert len(set(slots)) == len(slots)
        assert all(0 <= slot < NUM_BLOCKS * BLOCK_SIZE for slot in slots)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        held = sum(self.held(sequence) for sequence in self.tokens)
        assert self.pool.num_free + held == NUM_BLOCKS

    def teardown(self) -> None:
        for sequence in self.tokens:
            self.manager.free(sequence)
        self.manager.check_idle()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_block_freed_twice_is_refused_and_nothing_changes() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    with pytest.raises(BlockAccountingError, match="twice at once"):
        pool.free([first, first])
    pool.free([first])
    with pytest.raises(BlockAccountingError, match=f"block {first} is freed but nobody holds it"):
        pool.free([second, first])
    assert (pool.holders(first), pool.holders(second), pool.num_free) == (0, 1, 3)
    pool.check()


@pytest.mark.parametrize("block", [-1, 4])
def test_a_block_outside_the_pool_is_refused(block: int) -> None:
    with pytest.raises(BlockAccountingError):
        BlockPool(4).free([block])


def test_check_finds_lost_and_doubled_blocks() -> None:
    lost, doubled = BlockPool(3), BlockPool(3)
    lost._free.pop()
    with pytest.raises(BlockAccountingError, match="lost"):
        lost.check()
    doubled._free.append(doubled._free[0])
    with pytest.raises(BlockAccountingError, match="twice"):
        doubled.check()


def test_check_idle_names_what_is_left() -> None:
    pool = BlockPool(3)
    manager = KVCacheManager(pool, BLOCK_SIZE)
    manager.reserve("left", 1)
    with pytest.raises(BlockAccountingError, match="left"):
        manager.check_idle()
    manager.free("left")
    manager.check_idle()
    pool.allocate(1)
    with pytest.raises(BlockAccountingError, match="1 blocks are held by no sequence"):
        manager.check_idle()


def test_unknown_sequences_and_positions_are_refused() -> None:
    manager = KVCacheManager(BlockPool(3), BLOCK_SIZE)
    for ask in (manager.blocks, manager.free, lambda name: manager.slot(name, 0)):
        with pytest.raises(UnknownSequenceError, match="ghost"):
            ask("ghost")
    manager.reserve("a", 5)
    for position in (-1, 2 * BLOCK_SIZE):
        with pytest.raises(BlockAccountingError, match=f"position {position} "):
            manager.slot("a", position)
