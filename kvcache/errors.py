"""Errors of the paged cache.

KVCacheError
└── OutOfBlocksError    the pool cannot give the blocks asked for; nothing was taken
"""


class KVCacheError(Exception):
    """Root of everything the cache raises on purpose."""


class OutOfBlocksError(KVCacheError):
    """The pool has fewer free blocks than were asked for; nothing was taken."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"{asked} blocks asked for, {free} free")
        self.asked = asked
        self.free = free
