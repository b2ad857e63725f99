"""What the batcher needs of the cache and of the adapters' residency."""

from enum import StrEnum
from typing import Protocol

from polyloom.adapters.source import AdapterSource


class SequenceBlocks(Protocol):
    """Blocks by sequence. `kvcache.manager` implements it."""

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole cache holds."""
        ...

    def reserve(self, sequence_id: str, num_tokens: int) -> bool:
        """Make the sequence's table cover `num_tokens` tokens; False, and nothing taken, if the
        free blocks do not suffice."""
        ...

    def release(self, sequence_id: str) -> None:
        """Return all blocks of the sequence; without effect if it has none."""
        ...


class PinState(StrEnum):
    """What became of a pin."""

    RESIDENT = "resident"
    LOADING = "loading"
    NO_ROOM = "no_room"
    FAILED = "failed"


class AdapterPins(Protocol):
    """Pins by revision. The engine implements it over `adapters.residency`.

    A pin is taken once per sequence and keeps the revision's pages (loaded or being loaded) in
    place until it is returned.
    """

    def pin(self, source: AdapterSource) -> PinState:
        """Pin the revision, starting its load where needed. NO_ROOM and FAILED take no pin."""
        ...

    def state(self, digest: str) -> PinState:
        """State of a pinned revision. FAILED: its load failed; the pin must still be returned."""
        ...

    def unpin(self, digest: str) -> None:
        """Return one pin."""
        ...

    def failure(self, digest: str) -> tuple[str, str]:
        """Error code and message of a revision whose state is FAILED."""
        ...
