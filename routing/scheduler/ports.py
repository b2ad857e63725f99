"""What the batcher needs of the cache and of the adapters' residency."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from polyloom.adapters.errors import AdapterError
from polyloom.adapters.residency import ResidencyState
from polyloom.adapters.source import AdapterSource


class SequenceBlocks(Protocol):
    """Blocks by sequence: `kvcache.manager.KVCacheManager`."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole cache."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that a reservation can get."""
        ...

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens of one sequence fill."""
        ...

    def admit(self, sequence_id: str, tokens: Sequence[int], reusable: int) -> int:
        """Give a sequence without blocks a table that covers all `tokens`; how many of them, at
        most `reusable`, need not be computed.

        Raises:
            OutOfBlocksError: the free blocks do not suffice; nothing was taken.
        """
        ...

    def awaits(
        self, sequence_id: str, tokens: Sequence[int], reusable: int, running: Iterable[str]
    ) -> bool:
        """Whether a sequence without blocks would have much less to compute after the next step of
        the `running` ones, which compute the beginning of its own prompt."""
        ...

    def commit(self, sequence_id: str, tokens: Sequence[int], num_tokens: int) -> None:
        """The first `num_tokens` of `tokens` are computed and will not be taken back."""
        ...

    def reserve(self, sequence_id: str, num_tokens: int) -> None:
        """Make the sequence's table cover its first `num_tokens` tokens.

        Raises:
            OutOfBlocksError: the free blocks do not suffice; nothing was taken.
        """
        ...

    def truncate(self, sequence_id: str, num_tokens: int) -> None:
        """Take back what lies behind the sequence's first `num_tokens` tokens."""
        ...

    def free(self, sequence_id: str) -> None:
        """Return all blocks of a sequence that has some."""
        ...

    def __contains__(self, sequence_id: str) -> bool:
        """Whether the sequence has blocks."""
        ...


class AdapterPins(Protocol):
    """Pins by revision: `adapters.residency.Residency`.

    A pin is taken once per sequence and keeps the revision's pages (loaded or being loaded) in
    place until it is returned.
    """

    def pin(self, source: AdapterSource) -> ResidencyState:
        """Pin the revision, starting its load where needed. FAILED takes no pin."""
        ...

    def state(self, digest: str) -> ResidencyState:
        """State of a pinned revision. After FAILED the pin must still be returned."""
        ...

    def unpin(self, digest: str) -> None:
        """Return one pin."""
        ...

    def failure(self, digest: str) -> AdapterError:
        """Why a revision is FAILED."""
        ...
