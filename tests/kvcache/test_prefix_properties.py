"""No interleaving leaks a block, shares one across namespaces, or miscounts.

The model behind the blocks remembers for every slot whose token it holds and all tokens before it;
whatever a sequence is given must say exactly what the sequence would have computed.
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.errors import HoldTooLargeError, OutOfBlocksError
from polyloom.kvcache.manager import KVCacheManager
from polyloom.kvcache.namespace import Namespace
from polyloom.kvcache.prefix_cache import PrefixCache
from polyloom.kvcache.prefix_counters import GroupKey
from polyloom.kvcache.prefix_index import CachedBlock, Epoch

SIZE, NUM_BLOCKS, MAX_HELD = 2, 9, 3
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
NAMESPACES = (
    MINE,
    replace(MINE, salt="salt"),
    replace(MINE, adapter_digest="salt"),
    replace(MINE, owner_name="yours"),
    replace(MINE, owner_name="yours", owner_kind="group"),
)
# Few, and alike: prompts meet often.
PROMPTS = st.one_of(
    st.sampled_from(([0] * 8, [0] * 5, [0, 0, 0, 0, 1, 1, 1, 1], [1, 0, 0, 0, 0])),
    st.lists(st.integers(0, 1), min_size=1, max_size=10),
)
Slot = tuple[Namespace, int, tuple[int, ...]]


@dataclass
class Running:
    """A sequence as the model sees it; generation: of its namespace when it was opened."""

    namespace: Namespace
    generation: int
    tokens: list[int]
    prompt_len: int
    hold: str | None
    computed: int = 0
    admitted: bool = False


@dataclass
class Truth:
    """Counters of one group, counted again."""

    eligible: int = 0
    hits: int = 0
    reused: int = 0
    misses: int = 0
    evictions: int = 0
    invalidations: Counter[str] = field(default_factory=Counter)


class Sharing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.slots: dict[int, Slot] = {}
        self.pool = BlockPool(NUM_BLOCKS)
        self.cache = PrefixCache(self.pool, SIZE, 2 * SIZE, MAX_HELD, self.copy)
        self.manager = KVCacheManager(self.pool, SIZE, self.cache)
        self.sequences: dict[str, Running] = {}
        self.generations: Counter[Namespace] = Counter()
        self.truth: dict[GroupKey, Truth] = {}
        self.held: dict[str, set[CachedBlock]] = {}
        self.number = 0

    def copy(self, source: int, target: int) -> None:
        for offset in range(SIZE):
            self.slots[target * SIZE + offset] = self.slots[source * SIZE + offset]

    def cached(self) -> set[tuple[Epoch, tuple[int, ...]]]:
        return {(node.epoch, chain_tokens(node)) for node in self.cache.index}

    @rule(
        namespace=st.one_of(st.just(MINE), st.sampled_from(NAMESPACES)),
        prompt=PROMPTS,
        hold=st.sampled_from((None, None, None, "a", "b")),
    )
    def open(self, namespace: Namespace, prompt: list[int], hold: str | None) -> None:
        prompt = list(prompt)
        if hold is not None:
            try:
                self.cache.check_hold(hold, len(prompt))
            except HoldTooLargeError:
                return
        self.number += 1
        name = str(self.number)
        self.cache.open(name, namespace, tuple(prompt), hold)
        generation = self.generations[namespace]
        self.sequences[name] = Running(namespace, generation, prompt, len(prompt), hold)
        self.truth.setdefault(GroupKey.of(namespace), Truth())

    @precondition(lambda self: any(s.computed == 0 for s in self.sequences.values()))
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        waiting = [n for n, s in self.sequences.items() if n not in self.manager]
        if not waiting:
            return
        name = data.draw(st.sampled_from(waiting))
        sequence = self.sequences[name]
        reusable = len(sequence.tokens) - data.draw(
            st.sampled_from((1, 1, 1, len(sequence.tokens)))
        )
        before = self.cached()
        wanted = self.longest(before, sequence, reusable)
        try:
            found = self.manager.admit(name, sequence.tokens, reusable)
        except OutOfBlocksError:
            assert before == self.cached()
            assert name not in self.manager
            return
        self.evicted(before)
        # With no block to spare the block to copy from may have had to go.
        assert found in (wanted, wanted // SIZE * SIZE)
        for position in range(found):
            assert self.slots[self.manager.slot(name, position)] == self.content(name, position)
        if not sequence.admitted and sequence.hold is None:
            self.count(sequence, found, reusable)
        sequence.computed, sequence.admitted = found, True

    @precondition(lambda self: any(n in self.manager for n in self.sequences))
    @rule(data=st.data(), count=st.integers(1, 10), token=st.integers(0, 1))
    def run(self, data: st.DataObject, count: int, token: int) -> None:
        name = data.draw(st.sampled_from([n for n in self.sequences if n in self.manager]))
        sequence = self.sequences[name]
        before, end = self.cached(), min(len(sequence.tokens), sequence.computed + count)
        try:
            self.manager.reserve(name, len(sequence.tokens) + 2)  # two drafted, never verified
        except OutOfBlocksError:
            return
        self.evicted(before)
        for position in range(sequence.computed, len(sequence.tokens) + 2):
            slot = self.manager.slot(name, position)
            drafted = position >= end
            self.slots[slot] = (MINE, -1, ()) if drafted else self.content(name, position)
        sequence.computed = end
        self.manager.commit(name, [*sequence.tokens, 7, 7], end)
        self.manager.truncate(name, len(sequence.tokens))
        if end == len(sequence.tokens):
            sequence.tokens.append(token)

    @precondition(lambda self: any(n in self.manager for n in self.sequences))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([n for n in self.sequences if n in self.manager]))
        self.manager.free(name)
        self.sequences[name].computed = 0

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        sequence = self.sequences.pop(name)
        whole = sequence.prompt_len // SIZE
        chain = self.nodes(sequence)[:whole]
        if name in self.manager:
            self.manager.free(name)
        reuse = self.cache.close(name)
        assert (reuse is not None) == (sequence.admitted and sequence.hold is None)
        if sequence.hold is not None and whole and len(chain) == whole:
            self.held[sequence.hold] = set(chain)

    @rule(hold=st.sampled_from("ab"))
    def release(self, hold: str) -> None:
        self.cache.release_hold(hold)
        self.held.pop(hold, None)

    @rule(
        wanted=st.sampled_from(
            (
                {"owner_name": "mine"},
                {"owner_name": "yours", "owner_kind": "group"},
                {"adapter_digest": "salt"},
                {"salt": "salt"},
                {},
            )
        ),
        cause=st.sampled_from(("operator", "revision_retired", "tenant_purged")),
    )
    def invalidate(self, wanted: dict[str, str], cause) -> None:
        def matches(namespace: Namespace) -> bool:
            return all(getattr(namespace, name) == value for name, value in wanted.items())

        ended = {node for node in self.cache.index if matches(node.epoch.namespace)}
        for node in ended:
            self.truth[GroupKey.of(node.epoch.namespace)].invalidations[cause] += 1
        self.cache.invalidate(matches, cause)
        self.generations.update(namespace for namespace in NAMESPACES if matches(namespace))
        self.held = {hold: chain for hold, chain in self.held.items() if not chain & ended}
        assert not any(matches(node.epoch.namespace) for node in self.cache.index)

    def nodes(self, sequence: Running) -> list[CachedBlock]:
        """The sequence's tokens as far as they are cached under its own epoch."""
        if self.generations[sequence.namespace] != sequence.generation:
            return []
        by_chain = {
            chain_tokens(n): n for n in self.cache.index if n.epoch.namespace == sequence.namespace
        }
        chain = []
        for end in range(SIZE, len(sequence.tokens) + 1, SIZE):
            node = by_chain.get(tuple(sequence.tokens[:end]))
            if node is None:
                break
            chain.append(node)
        return chain

    def longest(self, cached: set, sequence: Running, reusable: int) -> int:
        """Tokens that can be reused: whole blocks, then the longest start of a next one."""
        if self.generations[sequence.namespace] != sequence.generation:
            return 0
        whole = len(self.nodes(sequence)[: reusable // SIZE]) * SIZE
        start, found = tuple(sequence.tokens[:whole]), 0
        for epoch, tokens in cached:
            if epoch.namespace == sequence.namespace and tokens[:-SIZE] == start:
                same = [
                    a == b for a, b in zip(tokens[whole:], sequence.tokens[whole:], strict=False)
                ]
                found = max(found, [*same, False].index(False))
        return whole + min(found, reusable - whole)

    def content(self, name: str, position: int) -> Slot:
        sequence = self.sequences[name]
        return sequence.namespace, sequence.generation, tuple(sequence.tokens[: position + 1])

    def evicted(self, before: set) -> None:
        for epoch, _ in before - self.cached():
            self.truth[GroupKey.of(epoch.namespace)].evictions += 1

    def count(self, sequence: Running, found: int, reusable: int) -> None:
        truth = self.truth[GroupKey.of(sequence.namespace)]
        truth.reused += found
        truth.eligible += reusable >= SIZE
        truth.hits += found >= SIZE
        truth.misses += found // SIZE < reusable // SIZE

    @invariant()
    def the_books_balance(self) -> None:
        self.pool.check()
        self.cache.index.check()
        assert set(self.cache.holds) == set(self.held)
        tables = [set(self.manager.blocks(n)) for n in self.sequences if n in self.manager]
        in_use = set[int]().union(*tables, *({n.block for n in c} for c in self.held.values()))
        assert self.manager.num_free_blocks + len(in_use) == NUM_BLOCKS
        assert len(set[CachedBlock]().union(*self.held.values())) <= MAX_HELD

    @invariant()
    def no_slot_belongs_to_two_namespaces(self) -> None:
        owners: dict[int, tuple[Namespace, int]] = {}
        for name, sequence in self.sequences.items():
            for block in self.manager.blocks(name) if name in self.manager else ():
                owner = (sequence.namespace, sequence.generation)
                assert owners.setdefault(block, owner) == owner
        for node in self.cache.index:
            mine = (node.epoch.namespace, self.generations[node.epoch.namespace])
            assert owners.get(node.block, mine) == mine
            tokens = chain_tokens(node)
            for offset in range(SIZE):
                known = self.slots[node.block * SIZE + offset]
                assert known == (*mine, tokens[: len(tokens) - SIZE + offset + 1])

    @invariant()
    def counters_equal_the_truth(self) -> None:
        assert self.cache.index.cross_namespace_hits == 0
        for key, truth in self.truth.items():
            group = self.cache.index.groups[key]
            assert (group.eligible, group.hits) == (truth.eligible, truth.hits)
            assert (group.tokens_reused, group.bytes_reused) == (truth.reused, 2 * truth.reused)
            assert group.misses.total() == truth.misses
            assert (group.evictions, group.invalidations) == (truth.evictions, truth.invalidations)
            nodes = [n for n in self.cache.index if GroupKey.of(n.epoch.namespace) == key]
            assert group.blocks == len(nodes)
            assert group.held_blocks == sum(n.holds > 0 for n in nodes)

    def teardown(self) -> None:
        for name in self.sequences:
            if name in self.manager:
                self.manager.free(name)
            self.cache.close(name)
        self.manager.check_idle()
        for hold in self.cache.holds:
            self.cache.release_hold(hold)
        assert self.manager.num_free_blocks == NUM_BLOCKS


def chain_tokens(node: CachedBlock) -> tuple[int, ...]:
    before = chain_tokens(node.parent) if isinstance(node.parent, CachedBlock) else ()
    return before + node.tokens


TestSharing = Sharing.TestCase
TestSharing.settings = settings(max_examples=100, stateful_step_count=40)
