"""The prefix cache, one property at a time."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.errors import BlockAccountingError, HoldTooLargeError, OutOfBlocksError
from polyloom.kvcache.manager import KVCacheManager
from polyloom.kvcache.namespace import Namespace
from polyloom.kvcache.prefix_cache import PrefixCache
from polyloom.kvcache.prefix_index import ATTENTION_TOKENS, MAX_SIBLINGS

SIZE = 4
MINE = Namespace(
    owner_kind="tenant",
    owner_name="mine",
    base_digest="base",
    adapter_digest=None,
    tokenizer_digest="tokenizer",
    template_digest="template",
    tool_schema_digest=None,
    salt=None,
    kv_dtype="float32",
)


class Bench:
    """A manager with its cache; `copies` are the blocks whose content was copied."""

    def __init__(self, num_blocks: int = 32, max_held: int = 16) -> None:
        self.copies: list[tuple[int, int]] = []
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(
            self.pool, SIZE, 64, max_held, lambda a, b: self.copies.append((a, b))
        )
        self.manager = KVCacheManager(self.pool, SIZE, self.cache)

    @property
    def evictions(self) -> int:
        return sum(group.evictions for group in self.cache.index.groups.values())

    def start(
        self,
        name: str,
        tokens: list[int],
        namespace: Namespace = MINE,
        hold: str | None = None,
    ) -> int:
        """Open and admit; how many tokens are reused."""
        self.cache.open(name, namespace, tuple(tokens), hold)
        return self.manager.admit(name, tokens, len(tokens) - 1)

    def end(self, name: str) -> None:
        self.manager.free(name)
        self.cache.close(name)

    def run(self, tokens: list[int], namespace: Namespace = MINE, hold: str | None = None) -> int:
        """A sequence from its start to its end; how many tokens were reused."""
        name = "run"
        found = self.start(name, tokens, namespace, hold)
        self.manager.commit(name, tokens, len(tokens))
        self.end(name)
        return found


@pytest.fixture
def bench() -> Callable[..., Bench]:
    return Bench


def test_two_that_compute_the_same_blocks_at_once_end_up_with_the_first_ones(bench) -> None:
    b, tokens = bench(), list(range(10))
    assert (b.start("first", tokens), b.start("second", tokens)) == (0, 0)
    b.manager.commit("second", tokens, 10)
    own = list(b.manager.blocks("second"))
    b.manager.commit("first", tokens, 10)
    assert list(b.manager.blocks("first"))[:2] == own[:2]
    assert list(b.manager.blocks("first"))[2] != own[2]
    assert b.manager.num_free_blocks == 32 - 4
    b.end("second")
    assert b.manager.num_free_blocks == 32 - 3
    b.end("first")
    b.manager.check_idle()


def test_what_was_not_committed_is_in_no_shared_block(bench) -> None:
    b, tokens = bench(), list(range(12))
    b.start("a", tokens)
    b.manager.commit("a", tokens, 7)
    assert b.run(tokens) == 4
    b.end("a")


def test_a_rejected_draft_leaves_nothing_behind(bench) -> None:
    b, tokens = bench(), [1] * 7
    b.start("a", tokens)
    b.manager.reserve("a", 9)
    b.manager.commit("a", [*tokens, 8, 8], 7)
    b.manager.truncate("a", 7)
    tokens.append(2)
    b.manager.reserve("a", 8)
    b.manager.commit("a", tokens, 8)
    b.end("a")
    assert b.run([*tokens[:7], 8, 8]) == 7
    assert b.run([*tokens, 3]) == 8


def test_a_block_is_cached_once_it_is_whole_however_its_tokens_came(bench) -> None:
    b, tokens = bench(), list(range(6))
    b.start("a", list(tokens))
    for count in range(7, 13):
        tokens.append(count)
        b.manager.reserve("a", count)
        b.manager.commit("a", tokens, count - 1)
    b.end("a")
    assert b.run([*tokens[:11], 99]) == 8


def test_the_last_token_is_never_reused_and_its_block_is_copied(bench) -> None:
    b, tokens = bench(), list(range(8))
    b.run(tokens)
    assert b.start("again", tokens) == 7
    ((source, target),) = b.copies
    assert list(b.manager.blocks("again"))[1] == target != source
    b.manager.commit("again", tokens, 8)
    assert list(b.manager.blocks("again"))[1] == source
    b.end("again")
    b.manager.check_idle()


def test_the_newest_children_are_looked_through_for_the_start_of_a_block(bench) -> None:
    b = bench(num_blocks=100)
    for last in range(MAX_SIBLINGS + 1):
        b.run([1, 2, 3, 4, 5, last, 0, 0])
    assert b.run([1, 2, 3, 4, 5, 6, 7, 8]) == 6
    assert b.run([1, 2, 3, 4, 5, 0, 7, 8]) == 5  # its sibling is the oldest by now


def test_committed_blocks_cannot_be_taken_back(bench) -> None:
    b, tokens = bench(), list(range(10))
    b.start("a", tokens)
    b.manager.commit("a", tokens, 9)
    b.manager.truncate("a", 8)
    with pytest.raises(BlockAccountingError, match="shares its first 8 tokens, 7 kept"):
        b.manager.truncate("a", 7)
    b.end("a")


def test_the_least_recently_used_goes_first_and_from_its_end(bench) -> None:
    b = bench(num_blocks=6)
    old, used = [1] * 8, [2] * 8
    b.run(used)
    b.run(old)
    assert b.run(used) == 7
    b.run([3] * 12)  # two blocks were free, the third was old's last
    cached = {(node.tokens[0], node.end) for node in b.cache.index}
    assert cached == {(1, 4), (2, 4), (2, 8), (3, 4), (3, 8), (3, 12)}
    assert b.evictions == 1


def test_a_block_deep_in_its_context_outlives_a_shallow_one_of_its_age(bench) -> None:
    deep = ATTENTION_TOKENS // SIZE
    b = bench(num_blocks=deep + 2)
    b.run([1] * ATTENTION_TOKENS)
    b.run([2] * SIZE)
    b.run([3] * 2 * SIZE)  # one block is missing: of the two ends the shallow one is younger
    assert b.start("deep", [1] * ATTENTION_TOKENS) == ATTENTION_TOKENS - 1


def test_blocks_in_use_or_held_are_no_room(bench) -> None:
    b = bench(num_blocks=8, max_held=3)
    b.run([1] * 12, hold="kept")
    b.start("runs", [2] * 8)
    b.manager.commit("runs", [2] * 8, 8)
    with pytest.raises(OutOfBlocksError, match="4 blocks asked for, 3 free"):
        b.start("large", [3] * 16)
    assert b.start("fits", [4] * 12) == 0
    assert b.evictions == 0


def test_a_sequence_that_needs_every_block_does_without_the_copy(bench) -> None:
    b = bench(num_blocks=4)
    b.run([1] * 8)
    assert b.start("all", [1, 1, 1, 1, 1, 1, *[2] * 10]) == 4
    assert b.copies == []


def test_a_hold_is_released_by_its_id_by_its_successor_and_by_an_invalidation(bench) -> None:
    b = bench(max_held=4)
    b.run([1] * 8, hold="a")
    with pytest.raises(HoldTooLargeError, match="'b': 3 blocks asked for, 2 held already, 4 may"):
        b.cache.check_hold("b", 12)
    b.cache.check_hold("a", 12)  # in its own place
    b.run([2] * 12, hold="a")
    assert (b.cache.holds, b.cache.num_held_blocks) == (("a",), 3)
    b.cache.invalidate(lambda namespace: namespace.owner_name == "mine", "operator")
    assert (b.cache.holds, b.manager.num_free_blocks, len(b.cache.index)) == ((), 32, 0)


def test_a_prefix_that_was_not_computed_is_not_held(bench) -> None:
    b = bench()
    b.start("cancelled", [1] * 12, hold="a")
    b.manager.commit("cancelled", [1] * 12, 8)
    b.end("cancelled")
    assert b.cache.holds == ()
    b.cache.open("never ran", MINE, (1,) * 8, "b")
    b.cache.close("never ran")
    assert b.cache.holds == ("b",)  # it was there already


def test_what_was_asked_before_an_invalidation_shares_nothing_after_it(bench) -> None:
    b, tokens = bench(), [1] * 9
    b.run(tokens)
    b.start("runs", tokens)
    b.cache.open("waits", MINE, tuple(tokens), None)
    b.cache.invalidate(lambda namespace: True, "template_changed")
    assert b.manager.admit("waits", tokens, 8) == 0
    for name in ("waits", "runs"):
        b.manager.commit(name, tokens, 9)
        b.end(name)
    assert len(b.cache.index) == 0
    assert b.run(tokens) == 0
    assert b.run(tokens) == 8


def test_salts_leave_no_records_behind(bench) -> None:
    b = bench(num_blocks=8)
    for number in range(100):
        b.run([1] * 8, replace(MINE, salt=str(number)))
    assert len(b.cache.index.groups) == 1
    assert len(b.cache.index._epochs) <= 8
    assert len(b.cache.index._leaves) <= 2 * 8 + 64
