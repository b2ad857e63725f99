"""Receive an upload and lay its files, safely, flat in one staging folder.

An upload is a tar, tar.gz or zip of a PEFT folder, or that folder's files one by one (multipart).
Nothing is ever extracted under a name that the upload chose: a member's path is only checked and
compared, and a file is written under its last component when that is on the allow-list below.
Everything else (README, optimizer state, nested archives, checkpoints in subfolders) is dropped.
"""

import asyncio
import os
import re
import shutil
import tempfile
import unicodedata
from collections.abc import AsyncIterable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, BinaryIO, Self

from polyloom.adapters.archives import (
    ArchiveKind,
    Member,
    open_members,
    refused_if_unreadable,
)
from polyloom.adapters.errors import InvalidAdapterError, TooLargeError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = "adapter_model.safetensors.index.json"
TEMPLATE_FILES = re.compile(r"chat_template[\w.-]*\.jinja", re.ASCII)
SHARD_FILES = re.compile(r"adapter_model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
TOKENIZER_FILES = frozenset(
    {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "tokenizer.model",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
    }
)
GENERATION_FILE = "generation_config.json"

_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_PICKLE_ADVICE = (
    "pickled weights can run code and are never read; convert them once where you trust them: "
    "`safetensors.torch.save_file(torch.load('adapter_model.bin', weights_only=True), "
    "'adapter_model.safetensors')`, or save with `save_pretrained(..., safe_serialization=True)`"
)
_CHUNK = 1 << 20
_MIB = 1 << 20


@dataclass(frozen=True)
class ArtifactFiles:
    """Which files an artefact of one kind has. config, weights: those that must be there, the
    weights under this name or sharded.  kept: whether a file of this name is part of it."""

    config: str
    weights: str
    kept: Callable[[str], bool]


@dataclass(frozen=True)
class ArtifactLimits:
    """What one upload may cost before anything in it is trusted.

    upload_bytes: of the body.  unpacked_bytes: of all members.  ratio: unpacked over packed bytes,
    held once an upload unpacks to more than `ratio_floor_bytes`.  entries: members of the archive,
    dropped ones included.  text_bytes: of each file that is not weights.
    """

    upload_bytes: int = 2 << 30
    unpacked_bytes: int = 4 << 30
    ratio: int = 100
    ratio_floor_bytes: int = 32 * _MIB
    entries: int = 2_000
    text_bytes: int = 64 * _MIB


class Staging:
    """A private folder for one upload, removed when the context ends.

    `receive_archive` or `receive_file` fill `folder`; `move_to` takes the result out.
    """

    def __init__(
        self, parent: Path, limits: ArtifactLimits, files: ArtifactFiles | None = None
    ) -> None:
        """files: of an adapter by default."""
        self._files = files or ADAPTER_FILES
        self._parent = parent
        self._limits = limits
        self._received = 0
        self._names: set[str] = set()
        self._pickle: str | None = None

    def __enter__(self) -> Self:
        self._parent.mkdir(parents=True, exist_ok=True)
        self._root = Path(tempfile.mkdtemp(prefix="upload-", dir=self._parent))
        self.folder = self._root / "files"
        self.folder.mkdir(mode=0o700)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._root)

    async def receive_archive(self, chunks: AsyncIterable[bytes], content_type: str | None) -> None:
        """Stream the body to disk, then unpack it into `folder`.

        Raises TooLargeError over a limit, InvalidAdapterError for anything unsafe or unreadable.
        """
        archive = self._root / "body"
        await self._stream(chunks, archive, self._limits.upload_bytes)
        await _in_thread(partial(self._unpack, archive, content_type))
        archive.unlink()

    async def receive_file(self, name: str, chunks: AsyncIterable[bytes]) -> None:
        """Take one file of a multipart upload; call `finish_files` after the last."""
        path = _safe_path(name)
        if path is None:
            return
        self._claim(path.name)
        if not self._files.kept(path.name):
            self._note_pickle(path.name)
            async for chunk in chunks:
                self._count(len(chunk))
            return
        limit = file_limit(path.name, self._limits)
        await self._stream(chunks, self.folder / path.name, limit)

    def finish_files(self) -> None:
        """Refuse a multipart upload that cannot be an adapter."""
        self._require_weights()

    def move_to(self, target: Path) -> None:
        """Move `folder` to `target`, which must not exist and must be on the same file system."""
        os.rename(self.folder, target)

    async def _stream(self, chunks: AsyncIterable[bytes], path: Path, limit: int) -> None:
        """Write off the event loop: a disk that is behind holds a write up for long."""
        written, pending = 0, bytearray()
        with _create(path) as out:
            async for chunk in chunks:
                written += len(chunk)
                self._count(len(chunk))
                if written > limit:
                    raise TooLargeError(path.name, limit, f"{path.name} is over {limit} bytes")
                pending += chunk
                if len(pending) >= _CHUNK:
                    await _in_thread(partial(_write, out, bytes(pending)))
                    pending.clear()
            await _in_thread(partial(_write, out, bytes(pending)))

    def _count(self, size: int) -> None:
        self._received += size
        limit = self._limits.upload_bytes
        if self._received > limit:
            raise TooLargeError("upload", limit, f"the upload is over {limit} bytes")

    def _claim(self, path: str) -> None:
        """Two names that some file system holds equal are one name."""
        key = unicodedata.normalize("NFC", path).casefold()
        if key in self._names:
            raise InvalidAdapterError(path, "is in the upload twice")
        self._names.add(key)

    def _unpack(self, archive: Path, content_type: str | None) -> None:
        kind = ArchiveKind.of(archive, content_type)
        budget = _UnpackBudget(archive.stat().st_size, self._limits)
        with open_members(archive, kind, self._limits.entries, budget.spend) as members:
            files = list(self._checked(members))
            top = _artifact_folder(files, self._files.config)
            for path, member in files:
                if path.parent == top:
                    self._extract(path.name, member, budget.spend)
        self._require_weights()

    def _checked(self, members: Iterator[Member]) -> Iterator[tuple[PurePosixPath, Member]]:
        for member in members:
            path = _safe_path(member.name)
            if member.special is not None:
                raise InvalidAdapterError(member.name, f"is a {member.special}, not a file")
            if path is None or member.is_folder:
                continue
            self._claim(str(path))
            yield path, member

    def _extract(self, name: str, member: Member, spend: Callable[[int], None]) -> None:
        if not self._files.kept(name):
            self._note_pickle(name)
            return
        limit = file_limit(name, self._limits)
        written = 0
        with refused_if_unreadable(name):
            source = member.open()
        with source, _create(self.folder / name) as out:
            for chunk in _chunks(source, name):
                written += len(chunk)
                if written > limit:
                    raise TooLargeError(name, limit, f"{name} is over {limit} bytes")
                spend(len(chunk))
                out.write(chunk)

    def _note_pickle(self, name: str) -> None:
        if not name.lower().endswith(_PICKLE_SUFFIXES):
            return
        if name.lower().startswith(self._files.weights.partition(".")[0]):
            raise InvalidAdapterError(name, _PICKLE_ADVICE)
        self._pickle = name

    def _require_weights(self) -> None:
        names = {p.name for p in self.folder.iterdir()}
        if self._files.config not in names:
            raise InvalidAdapterError(self._files.config, "is missing")
        if any(n.endswith(".safetensors") for n in names):
            return
        # A trainer's optimizer.pt beside real weights is only dropped; alone it is the weights.
        if self._pickle is not None:
            raise InvalidAdapterError(self._pickle, _PICKLE_ADVICE)
        raise InvalidAdapterError(self._files.weights, "is missing")


class _UnpackBudget:
    """Bytes that an archive may still unpack to."""

    def __init__(self, packed: int, limits: ArtifactLimits) -> None:
        self._spent = 0
        self._limits = limits
        self._by_ratio = max(limits.ratio_floor_bytes, packed * limits.ratio)

    def spend(self, size: int) -> None:
        self._spent += size
        if self._spent > self._limits.unpacked_bytes:
            limit = self._limits.unpacked_bytes
            raise TooLargeError("upload", limit, f"the upload unpacks to over {limit} bytes")
        if self._spent > self._by_ratio:
            raise InvalidAdapterError(
                "upload", f"unpacks to more than {self._limits.ratio} times its own size"
            )


def is_kept(name: str) -> bool:
    """Whether a file of this name is part of an adapter."""
    return (
        name in {CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE, GENERATION_FILE}
        or name in TOKENIZER_FILES
        or SHARD_FILES.fullmatch(name) is not None
        or TEMPLATE_FILES.fullmatch(name) is not None
    )


ADAPTER_FILES = ArtifactFiles(CONFIG_FILE, WEIGHTS_FILE, is_kept)


def file_limit(name: str, limits: ArtifactLimits) -> int:
    """Largest size of this file in bytes: configs are small, weights are what uploads are for."""
    if name.endswith(".safetensors"):
        return limits.unpacked_bytes
    return limits.text_bytes


def _safe_path(name: str) -> PurePosixPath | None:
    """The member's relative path; None for the noise that archivers on other systems add.

    Raises InvalidAdapterError for a name that means anything but a place below the root.
    """
    unsafe = (
        not name
        or name.startswith("/")
        or "\\" in name
        or any(ord(c) < 32 or ord(c) == 127 for c in name)
        or re.match(r"[A-Za-z]:", name) is not None
        or ".." in name.split("/")
    )
    if unsafe:
        raise InvalidAdapterError(repr(name), "is not a plain relative path")
    path = PurePosixPath(name)
    if not path.parts:
        return None
    if "__MACOSX" in path.parts or path.name.startswith("._") or path.name == ".DS_Store":
        return None
    return path


def _artifact_folder(files: list[tuple[PurePosixPath, Member]], config: str) -> PurePosixPath:
    """The root, or the one folder at the top that holds the artefact."""
    holders = [path.parent for path, _ in files if path.name == config]
    if not holders:
        raise InvalidAdapterError(config, "is missing")
    depth = min(len(h.parts) for h in holders)
    shallowest = [h for h in holders if len(h.parts) == depth]
    if depth > 1:
        raise InvalidAdapterError(
            str(shallowest[0] / config), "lies deeper than one folder; pack its content itself"
        )
    if len(shallowest) > 1:
        raise InvalidAdapterError(
            str(shallowest[1] / config), "is a second one; an upload is one folder"
        )
    return shallowest[0]


def _create(path: Path) -> BinaryIO:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def _write(out: BinaryIO, data: bytes) -> None:
    out.write(data)


def _chunks(source: IO[bytes], name: str) -> Iterator[bytes]:
    with refused_if_unreadable(name):
        while chunk := source.read(_CHUNK):
            yield chunk


async def _in_thread(work: Callable[[], None]) -> None:
    """Run blocking work; when cancelled, leave only after the thread has left the folder."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):
            await task
        raise
