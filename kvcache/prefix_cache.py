"""The prefix cache: what an open sequence may reuse, and what it leaves to later ones.

Only committed tokens enter a shared block, and each sequence with a namespace does two things: it
looks up its tokens when it gets its blocks, and it offers each block that its committed tokens
fill. Two sequences that compute the same block at once end up with the first one's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.errors import BlockAccountingError, HoldTooLargeError
from polyloom.kvcache.namespace import Namespace, block_hashes
from polyloom.kvcache.prefix_counters import InvalidationCause, PrefillCost, Reuse
from polyloom.kvcache.prefix_index import CachedBlock, Epoch, PrefixIndex
from polyloom.kvcache.prompt_memory import PromptMemory

AWAITED_TOKENS = 64
"""Running fewer tokens a second time costs less than a wait of one step."""


@dataclass(slots=True)
class Match:
    """What a sequence reuses: whole blocks, then the first tokens of one that is to be copied."""

    chain: list[CachedBlock]
    partial: CachedBlock | None = None
    partial_tokens: int = 0

    @property
    def blocks(self) -> list[int]:
        return [node.block for node in self.chain]

    @property
    def num_tokens(self) -> int:
        return (self.chain[-1].end if self.chain else 0) + self.partial_tokens


@dataclass(slots=True)
class _Sharing:
    """One open sequence.

    hashes: of its tokens' whole blocks so far.  shared: leading blocks of its table that are
    cached ones; tail: the last of them, or the epoch.
    """

    epoch: Epoch
    prompt: tuple[int, ...]
    hold: str | None
    tail: Epoch | CachedBlock
    hashes: list[bytes] = field(default_factory=list)
    shared: int = 0
    remembered: bool = False
    reuse: Reuse | None = None

    def moved_to(self, chain: Sequence[CachedBlock]) -> None:
        self.shared = len(chain)
        self.tail = chain[-1] if chain else self.epoch


class PrefixCache:
    """Blocks shared between sequences of one pool, by namespace."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        block_bytes: int,
        max_held_blocks: int,
        copy_block: Callable[[int, int], None],
    ) -> None:
        """block_bytes: of one block's K and V.  max_held_blocks: that held prefixes may pin.
        copy_block: copies the content of the first block to the second."""
        self.block_size = block_size
        self.index = PrefixIndex(pool)
        self.prefill_cost = PrefillCost()
        self._pool = pool
        self._token_bytes = block_bytes // block_size
        self._max_held = max_held_blocks
        self._copy_block = copy_block
        self._memory = PromptMemory(block_size)
        self._open: dict[str, _Sharing] = {}
        self._holds: dict[str, tuple[CachedBlock, ...]] = {}

    @property
    def holds(self) -> tuple[str, ...]:
        """Ids of the held prefixes."""
        return tuple(self._holds)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that held prefixes pin."""
        return len({node for chain in self._holds.values() for node in chain})

    def __contains__(self, sequence_id: str) -> bool:
        """Whether the sequence is open."""
        return sequence_id in self._open

    def check_hold(self, hold: str, prompt_len: int) -> None:
        """Raise HoldTooLargeError if a prompt's whole blocks, beside what is held and promised,
        exceed what held prefixes may pin."""
        asked = prompt_len // self.block_size
        held = len({node for name, chain in self._holds.items() if name != hold for node in chain})
        promised = sum(
            len(sharing.prompt) // self.block_size
            for sharing in self._open.values()
            if sharing.hold is not None
        )
        if asked + held + promised > self._max_held:
            raise HoldTooLargeError(hold, asked, held + promised, self._max_held)

    def open(
        self, sequence_id: str, namespace: Namespace, prompt: tuple[int, ...], hold: str | None
    ) -> None:
        """Let a sequence share blocks from now until `close`.

        An invalidation between the two ends its sharing, whether it runs by then or not.
        """
        epoch = self.index.open(namespace)
        self._open[sequence_id] = _Sharing(epoch, prompt, hold, tail=epoch)

    def close(self, sequence_id: str) -> Reuse | None:
        """The sequence has ended and its blocks are freed; None if it never got any, or only
        warmed a held prefix.

        Its prompt's whole blocks are pinned if it asked for that and all of them are cached.
        """
        sharing = self._open.pop(sequence_id)
        if sharing.hold is not None and sharing.epoch.alive:
            self._hold(sharing.hold, sharing)
        self.index.close(sharing.epoch)
        return sharing.reuse

    def match(self, sequence_id: str, tokens: Sequence[int], reusable: int) -> Match:
        """What is cached of the first `reusable` of the sequence's tokens. Takes nothing."""
        sharing = self._open[sequence_id]
        if not sharing.epoch.alive:
            return Match([])
        self._extend_hashes(sharing, tokens, len(tokens))
        whole = reusable // self.block_size
        chain = self.index.find(sharing.epoch, sharing.hashes[:whole])
        done = len(chain) * self.block_size
        rest = tokens[done : min(reusable, done + self.block_size)]
        partial = self.index.find_partial(chain[-1] if chain else sharing.epoch, rest)
        return Match(chain, *partial) if partial else Match(chain)

    def awaits(
        self, sequence_id: str, tokens: Sequence[int], reusable: int, running: Iterable[str]
    ) -> bool:
        """Whether one of the `running` sequences is to compute `AWAITED_TOKENS` or more of the first
        `reusable` tokens next, so that this one would find them later."""
        mine, awaited = self._open[sequence_id], -(-AWAITED_TOKENS // self.block_size)
        if not mine.epoch.alive:
            return False
        self._extend_hashes(mine, tokens, len(tokens))
        whole = reusable // self.block_size
        for other in running:
            theirs = self._open.get(other)
            if theirs is None or theirs.epoch is not mine.epoch:
                continue
            last = theirs.shared + awaited - 1  # its hash stands for all tokens before it, too
            if last < min(whole, len(theirs.hashes)) and theirs.hashes[last] == mine.hashes[last]:
                return True
        return False

    def reuse(self, sequence_id: str, match: Match, table: Sequence[int], reusable: int) -> None:
        """The sequence has its table, which begins with the match's blocks; both they and the
        partial one are held for it. Copies the partial one and counts what was reused; not for a
        sequence that warms a held prefix, which is nobody's request."""
        sharing = self._open[sequence_id]
        if match.partial is not None:
            self._copy_block(match.partial.block, table[len(match.chain)])
        sharing.moved_to(match.chain)
        if sharing.reuse is None and sharing.hold is None:
            sharing.reuse = self._outcome(sharing, match, reusable)
            sharing.epoch.group.count(sharing.reuse)

    def commit(
        self, sequence_id: str, table: list[int], tokens: Sequence[int], num_tokens: int
    ) -> None:
        """K and V of the first `num_tokens` tokens are final: cache the blocks that they fill.

        Where another sequence was first, `table` gets its block and the own one is freed.
        """
        sharing = self._open[sequence_id]
        whole = num_tokens // self.block_size
        if whole == sharing.shared or not sharing.epoch.alive:
            return
        self._extend_hashes(sharing, tokens, num_tokens)
        for place in range(sharing.shared, whole):
            filled = tokens[place * self.block_size : (place + 1) * self.block_size]
            own = table[place]
            node = self.index.insert(sharing.tail, sharing.hashes[place], filled, own)
            if node.block != own:
                self._pool.share([node.block])
                self._pool.free([own])
                table[place] = node.block
            sharing.shared, sharing.tail = place + 1, node
        self._remember(sharing)

    def freed(self, sequence_id: str, table: Sequence[int]) -> None:
        """The sequence's blocks were freed, at its end or because it was preempted."""
        self._open[sequence_id].moved_to([])
        self.index.released(table)

    def shared_tokens(self, sequence_id: str) -> int:
        """Leading tokens of the sequence that lie in cached blocks."""
        return self._open[sequence_id].shared * self.block_size

    def release_hold(self, hold: str) -> None:
        """Unpin a held prefix; unknown ids are none."""
        self.index.unhold(self._holds.pop(hold, ()))

    def invalidate(self, matches: Callable[[Namespace], bool], cause: InvalidationCause) -> None:
        """Make all blocks of the matching namespaces unreachable, and free those that no running
        sequence holds; their held prefixes are released.

        Where their owner may not have them any more, nothing of their text stays either.
        """
        ended = set(self.index.invalidate(matches, cause))
        for hold, chain in tuple(self._holds.items()):
            if chain[0].epoch in ended:
                self.release_hold(hold)
        if cause in ("tenant_purged", "share_revoked"):
            self._memory.forget(matches)

    def check(self) -> None:
        """Raise BlockAccountingError unless nothing is open, and the index and the pool agree."""
        if self._open:
            raise BlockAccountingError(f"sequences left open: {sorted(self._open)}")
        self.index.check()

    def _outcome(self, sharing: _Sharing, match: Match, reusable: int) -> Reuse:
        eligible = reusable // self.block_size
        found, cached = len(match.chain), match.num_tokens
        miss = None
        if found < eligible:
            miss = self._memory.explain(sharing.epoch, sharing.prompt, found, eligible)
        return Reuse(
            eligible=eligible * self.block_size,
            cached=cached,
            blocks=found,
            bytes=cached * self._token_bytes,
            saved=cached * self.prefill_cost.per_token,
            miss=miss,
        )

    def _remember(self, sharing: _Sharing) -> None:
        """Once the prompt's whole blocks are cached, later prompts are compared with it."""
        whole = len(sharing.prompt) // self.block_size
        if not sharing.remembered and 0 < whole <= sharing.shared:
            sharing.remembered = True
            self._memory.remember(sharing.epoch, sharing.hashes[whole - 1], sharing.prompt)

    def _hold(self, hold: str, sharing: _Sharing) -> None:
        whole = len(sharing.prompt) // self.block_size
        self._extend_hashes(sharing, sharing.prompt, len(sharing.prompt))
        chain = self.index.find(sharing.epoch, sharing.hashes[:whole])
        if len(chain) == whole > 0:
            self.index.hold(chain)
            self.release_hold(hold)
            self._holds[hold] = tuple(chain)

    def _extend_hashes(self, sharing: _Sharing, tokens: Sequence[int], num_tokens: int) -> None:
        """Hash the blocks that the first `num_tokens` fill, each once in a sequence's life."""
        known = len(sharing.hashes)
        if num_tokens // self.block_size > known:
            parent = sharing.hashes[-1] if known else sharing.epoch.hash
            fresh = tokens[known * self.block_size : num_tokens]
            sharing.hashes += block_hashes(parent, fresh, self.block_size)
