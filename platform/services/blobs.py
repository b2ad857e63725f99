"""Content-addressed folders under the data directory: `blobs/<hex>`, one for each revision content.

A folder appears in the store by one rename from `staging` on the same file system, complete and
flushed, and leaves by one rename into `staging`: no reader ever sees a part of one.
"""

import asyncio
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


class BlobStore:
    """Moves folders in and out. Which digests are needed is for the database to say."""

    def __init__(self, data_dir: Path) -> None:
        """Creates `blobs` and `staging` in data_dir."""
        self._blobs = data_dir / "blobs"
        self._staging = data_dir / "staging"
        for folder in (self._blobs, self._staging):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def path(self, digest: str) -> Path:
        """Where the content of `digest` (`sha256:<64 hex>`) lies, or would. Raises ValueError."""
        matched = _DIGEST.fullmatch(digest)
        if matched is None:
            raise ValueError(f"not a digest: {digest!r}")
        return self._blobs / matched.group(1)

    def holds(self, digest: str) -> bool:
        """Whether the folder is there."""
        return self.path(digest).is_dir()

    @contextmanager
    def staging(self) -> Generator[Path]:
        """An empty folder for one upload; at the end it goes with what was not moved out of it."""
        folder = self._staging / uuid.uuid4().hex
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def flush(self, folder: Path) -> None:
        """Write every file of a staged folder through to the disk."""
        await asyncio.to_thread(_flush, folder)

    def put(self, digest: str, folder: Path) -> None:
        """Move a staged folder in. One already there (left by a crash) makes way for it."""
        target = self.path(digest)
        if target.exists():
            self._move_out(target)
        folder.rename(target)

    def take_out(self, digest: str) -> None:
        """Move the folder out of the store; `empty_trash` deletes it."""
        target = self.path(digest)
        if target.exists():
            self._move_out(target)

    async def empty_trash(self) -> None:
        """Delete what was moved out."""
        for folder in self._staging.glob("trash-*"):
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def sweep(self, known: Collection[str], min_age: float) -> int:
        """Delete what a crash left: blobs whose digest is not in `known` and staged uploads, both
        untouched for `min_age` seconds (another process may be about to record one). Returns how
        many."""
        names = {self.path(digest).name for digest in known}
        orphans = [folder for folder in self._blobs.iterdir() if folder.name not in names]
        before, removed = time.time() - min_age, 0
        for folder in [*orphans, *self._staging.iterdir()]:
            if _last_change(folder) <= before:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                removed += 1
        return removed

    def _move_out(self, target: Path) -> None:
        target.rename(self._staging / f"trash-{uuid.uuid4().hex}")


def _flush(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _last_change(folder: Path) -> float:
    """Unix time of the last change of the folder, its move into place included, or of anything in
    it: a slow upload only grows its files."""
    try:
        return max(map(_ctime, [folder, *folder.rglob("*")]))
    except FileNotFoundError:
        return float("inf")


def _ctime(path: Path) -> float:
    return path.lstat().st_ctime
