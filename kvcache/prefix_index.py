"""Cached blocks by the hash of their chain: what is found, what stays, what goes first.

Chains of one namespace form a tree below its `Epoch`. Whoever holds a cached block holds all blocks
before it, so an idle block has only idle ones after it, and eviction from the leaves always works.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.errors import BlockAccountingError
from polyloom.kvcache.namespace import Namespace
from polyloom.kvcache.prefix_counters import GroupCounters, GroupKey, InvalidationCause

# Context at which attention costs a token about as much as everything else does.
ATTENTION_TOKENS = 4096
# Newest children of a block that are looked through for one that begins with the wanted tokens.
MAX_SIBLINGS = 32


class Epoch:
    """One namespace from its first use to its invalidation; what comes after is another epoch.

    users: open sequences. alive: its blocks can be found, and blocks can be added.
    """

    __slots__ = ("alive", "children", "group", "hash", "namespace", "users")

    def __init__(self, namespace: Namespace, root: bytes, group: GroupCounters) -> None:
        self.namespace = namespace
        self.hash = root
        self.group = group
        self.users = 0
        self.alive = True
        self.children: dict[bytes, CachedBlock] = {}


class CachedBlock:
    """A block whose content may be shared: `tokens`, preceded by its parent's chain.

    end: tokens of the chain.  holds: held prefixes that it is part of.  used: when, as a count of
    uses.  worth: the idle leaf with the least goes first.
    """

    __slots__ = (
        "block",
        "children",
        "end",
        "epoch",
        "hash",
        "holds",
        "parent",
        "tokens",
        "used",
        "worth",
    )

    def __init__(
        self, parent: "Epoch | CachedBlock", block_hash: bytes, tokens: Sequence[int], block: int
    ) -> None:
        self.parent = parent
        self.epoch: Epoch = parent if isinstance(parent, Epoch) else parent.epoch
        self.end: int = len(tokens) + (0 if isinstance(parent, Epoch) else parent.end)
        self.hash = block_hash
        self.tokens = tuple(tokens)
        self.block = block
        self.children: dict[bytes, CachedBlock] = {}
        self.holds = 0
        self.used = 0
        self.worth = 0.0


class PrefixIndex:
    """All cached blocks of one pool.

    Eviction is GreedyDual: a use makes a block worth what recomputing it costs, above what was
    evicted last; so unused blocks age, and dear ones (deep in their context) age longer.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.groups: dict[GroupKey, GroupCounters] = {}
        self.checked_hits = 0
        self.cross_namespace_hits = 0
        self._pool = pool
        self._epochs: dict[bytes, Epoch] = {}
        self._by_hash: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._leaves: list[tuple[float, int, CachedBlock]] = []
        self._uses = itertools.count(1)
        self._evicted_worth = 0.0

    def __len__(self) -> int:
        return len(self._by_hash)

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._by_hash.values())

    def by_use(self) -> Iterator[CachedBlock]:
        """The most recently used first."""
        return reversed(self._by_hash.values())

    def open(self, namespace: Namespace) -> Epoch:
        """The namespace's epoch, which stays known until as many `close` calls and its blocks'
        eviction."""
        root = namespace.root()
        epoch = self._epochs.get(root)
        if epoch is None:
            group = self.groups.setdefault(GroupKey.of(namespace), GroupCounters())
            epoch = self._epochs[root] = Epoch(namespace, root, group)
        epoch.users += 1
        return epoch

    def close(self, epoch: Epoch) -> None:
        """One user less."""
        epoch.users -= 1
        self._forget_if_empty(epoch)

    def find(self, epoch: Epoch, hashes: Sequence[bytes]) -> list[CachedBlock]:
        """The longest chain of cached blocks with these hashes; each is checked to be the epoch's
        own."""
        chain: list[CachedBlock] = []
        for block_hash in hashes:
            node = self._by_hash.get(block_hash)
            if node is None:
                break
            self.checked_hits += 1
            if node.epoch is not epoch:
                self.cross_namespace_hits += 1
                break
            chain.append(node)
        return chain

    def find_partial(
        self, parent: Epoch | CachedBlock, tokens: Sequence[int]
    ) -> tuple[CachedBlock, int] | None:
        """The child of `parent` that begins with the most of `tokens`, and how many; None if none
        begins with the first."""
        best: tuple[CachedBlock, int] | None = None
        for node in itertools.islice(reversed(parent.children.values()), MAX_SIBLINGS):
            length = _common_prefix(node.tokens, tokens)
            if length > (0 if best is None else best[1]):
                best = (node, length)
        return best

    def insert(
        self, parent: Epoch | CachedBlock, block_hash: bytes, tokens: Sequence[int], block: int
    ) -> CachedBlock:
        """Cache a held block, or get the one that has the same chain already."""
        known = self._by_hash.get(block_hash)
        if known is not None:
            return known
        self._pool.keep(block)
        node = CachedBlock(parent, block_hash, tokens, block)
        parent.children[block_hash] = node
        self._by_hash[block_hash] = self._by_block[block] = node
        node.epoch.group.blocks += 1
        self._use(node)
        return node

    def released(self, blocks: Sequence[int]) -> None:
        """A holder of these blocks, first to last of a table, gave them up after a use."""
        for block in reversed(blocks):
            node = self._by_block.get(block)
            if node is not None:
                self._use(node)
                self._offer(node)

    def hold(self, chain: Iterable[CachedBlock]) -> None:
        """Pin a chain, from its root on, against eviction."""
        for node in chain:
            node.holds += 1
            if node.holds == 1:
                self._pool.share([node.block])
                node.epoch.group.held_blocks += 1

    def unhold(self, chain: Iterable[CachedBlock]) -> None:
        """Unpin what `hold` pinned; blocks that were invalidated meanwhile go now."""
        for node in reversed(list(chain)):
            node.holds -= 1
            if node.holds == 0:
                self._pool.free([node.block])
                node.epoch.group.held_blocks -= 1
                self._offer(node)

    def evict(self, count: int) -> None:
        """Free `count` idle blocks. Raises BlockAccountingError if there are fewer."""
        while count:
            if not self._leaves:
                raise BlockAccountingError(f"{count} idle blocks are not among the leaves")
            worth, used, node = heapq.heappop(self._leaves)
            if node.used != used or not self._evictable(node):
                continue
            self._evicted_worth = max(self._evicted_worth, worth)
            node.epoch.group.evictions += 1
            self._drop(node)
            self._forget_if_empty(node.epoch)
            count -= 1

    def invalidate(
        self, matches: Callable[[Namespace], bool], cause: InvalidationCause
    ) -> list[Epoch]:
        """End the epochs of all matching namespaces; their blocks are free unless held."""
        ended = [epoch for epoch in self._epochs.values() if matches(epoch.namespace)]
        for epoch in ended:
            epoch.alive = False
            del self._epochs[epoch.hash]
            chain = _below(epoch)
            for node in reversed(chain):
                self._drop(node)
            epoch.group.invalidations[cause] += len(chain)
        return ended

    def check(self) -> None:
        """Raise BlockAccountingError unless every cached block is reachable from its own root only
        and kept in the pool."""
        reachable = [node for epoch in self._epochs.values() for node in _below(epoch)]
        if {node.hash for node in reachable} != set(self._by_hash) or len(reachable) != len(self):
            raise BlockAccountingError("a cached block is not reachable, or is more than once")
        for node in reachable:
            if self._by_block.get(node.block) is not node:
                raise BlockAccountingError(f"block {node.block} is cached for two chains")
        if self._pool.num_kept != len(self):
            raise BlockAccountingError(f"{self._pool.num_kept} blocks kept, {len(self)} cached")

    def _use(self, node: CachedBlock) -> None:
        node.used = next(self._uses)
        self._by_hash[node.hash] = self._by_hash.pop(node.hash)  # the order is that of use
        node.worth = self._evicted_worth + 1 + node.end / ATTENTION_TOKENS

    def _offer(self, node: CachedBlock) -> None:
        """Let eviction know of a block that may have become an idle leaf."""
        if not self._evictable(node):
            return
        heapq.heappush(self._leaves, (node.worth, node.used, node))
        if len(self._leaves) > 2 * len(self._by_hash) + 64:
            self._leaves = [
                entry
                for entry in self._leaves
                if entry[2].used == entry[1] and self._evictable(entry[2])
            ]
            heapq.heapify(self._leaves)

    def _evictable(self, node: CachedBlock) -> bool:
        is_cached = self._by_block.get(node.block) is node
        return is_cached and not node.children and self._pool.holders(node.block) == 0

    def _drop(self, node: CachedBlock) -> None:
        """Forget a leaf."""
        del self._by_hash[node.hash], self._by_block[node.block]
        del node.parent.children[node.hash]
        node.epoch.group.blocks -= 1
        self._pool.discard(node.block)
        if isinstance(node.parent, CachedBlock):
            self._offer(node.parent)

    def _forget_if_empty(self, epoch: Epoch) -> None:
        if epoch.alive and not epoch.users and not epoch.children:
            del self._epochs[epoch.hash]


def _below(epoch: Epoch) -> list[CachedBlock]:
    """All blocks of an epoch, parents before their children."""
    found = list(epoch.children.values())
    for node in found:  # grows while it is walked
        found += node.children.values()
    return found


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    length = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        length += 1
    return length
