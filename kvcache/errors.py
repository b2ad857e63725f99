"""Errors of the paged cache.

KVCacheError
├── OutOfBlocksError    the pool cannot give the blocks asked for; nothing was taken
├── UnknownSequenceError    the sequence holds no blocks
├── HoldTooLargeError       a prefix to hold exceeds what held prefixes may pin
└── BlockAccountingError    blocks are lost, held twice or freed twice: a bug, found by a check
"""


class KVCacheError(Exception):
    """Root of everything the cache raises on purpose."""


class OutOfBlocksError(KVCacheError):
    """The pool has fewer free blocks than were asked for; nothing was taken."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"{asked} blocks asked for, {free} free")
        self.asked = asked
        self.free = free


class UnknownSequenceError(KVCacheError):
    """The manager was asked about a sequence that holds no blocks."""

    def __init__(self, sequence_id: str) -> None:
        super().__init__(f"sequence {sequence_id} holds no blocks")
        self.sequence_id = sequence_id


class HoldTooLargeError(KVCacheError):
    """A prefix cannot be held beside those that are: too many blocks would be pinned."""

    def __init__(self, hold: str, asked: int, held: int, limit: int) -> None:
        super().__init__(
            f"hold {hold!r}: {asked} blocks asked for, {held} held already, {limit} may be held"
        )
        self.hold = hold


class BlockAccountingError(KVCacheError):
    """The books of the cache do not add up."""
