"""The members of a tar, tar.gz or zip, listed without trusting what the archive says of itself."""

import errno
import gzip
import lzma
import os
import stat
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Self, cast

from polyloom.adapters.errors import InvalidAdapterError

_CHUNK = 1 << 20
# A longer extended header (a path, a comment) has no honest use, and tarfile reads it whole.
_MAX_TAR_HEADER = 1 << 16
_MAX_ZIP_DIRECTORY = 1 << 20
_EOCD = struct.Struct("<4s4H2IH")
# What the readers meet in headers that are not what they should be, wherever they look at them.
_UNREADABLE = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    OSError,
    EOFError,
    ValueError,
    LookupError,
    ArithmeticError,
    RuntimeError,
)
# Which errors of the system an archive can bring about: seeking to where it says that something is.
# A full disk and the like are the server's own.
_FROM_CONTENT = (None, errno.EINVAL)


class ArchiveKind(StrEnum):
    """What the body is, by its first bytes."""

    TAR = "application/x-tar"
    TAR_GZ = "application/gzip"
    ZIP = "application/zip"

    @classmethod
    def of(cls, path: Path, content_type: str | None) -> "ArchiveKind":
        """The kind by magic bytes; a content type that names another kind is refused."""
        with path.open("rb") as file:
            head = file.read(265)
        kind = _kind_by_magic(head)
        if kind is None:
            raise InvalidAdapterError("upload", "is neither a tar, a tar.gz nor a zip")
        declared = _KINDS_BY_TYPE.get((content_type or "").split(";")[0].strip().lower())
        if declared is not None and declared is not kind:
            raise InvalidAdapterError("content-type", f"says {declared}, the body is {kind}")
        return kind


_KINDS_BY_TYPE = {
    "application/x-tar": ArchiveKind.TAR,
    "application/tar": ArchiveKind.TAR,
    "application/gzip": ArchiveKind.TAR_GZ,
    "application/x-gzip": ArchiveKind.TAR_GZ,
    "application/x-gtar-compressed": ArchiveKind.TAR_GZ,
    "application/zip": ArchiveKind.ZIP,
    "application/x-zip-compressed": ArchiveKind.ZIP,
}


@dataclass(frozen=True)
class Member:
    """One entry as the archive lists it. special: "symbolic link", "device" …, or None."""

    name: str
    is_folder: bool
    special: str | None
    open: Callable[[], IO[bytes]]


@contextmanager
def open_members(
    path: Path, kind: ArchiveKind, max_entries: int, spend: Callable[[int], None]
) -> Iterator[Iterator[Member]]:
    """The archive's members, readable while the context lasts.

    `spend` is told of every byte that a gzip stream unpacks to, before it is written. Raises
    InvalidAdapterError when the archive cannot be read or has more than `max_entries`.
    """
    with ExitStack() as opened:
        with refused_if_unreadable("upload"):
            if kind is ArchiveKind.ZIP:
                members = _zip_members(opened.enter_context(_open_zip(path, max_entries)))
            else:
                plain = _gunzip(path, spend) if kind is ArchiveKind.TAR_GZ else path
                tar = opened.enter_context(
                    tarfile.open(plain, "r:", tarinfo=_BoundedTarInfo, errorlevel=2)
                )
                members = _tar_members(tar, max_entries)
        yield _readable(members)


@contextmanager
def refused_if_unreadable(name: str) -> Iterator[None]:
    """Around every look into an archive: what its reader cannot make sense of is an
    InvalidAdapterError that names the member, or the upload. What the system fails at is left."""
    try:
        yield
    except _UNREADABLE as error:
        if isinstance(error, OSError) and error.errno not in _FROM_CONTENT:
            raise
        raise InvalidAdapterError(name, f"cannot be unpacked: {error}") from error


def _readable(members: Iterator[Member]) -> Iterator[Member]:
    with refused_if_unreadable("upload"):
        yield from members


def _kind_by_magic(head: bytes) -> ArchiveKind | None:
    if head.startswith(b"\x1f\x8b"):
        return ArchiveKind.TAR_GZ
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return ArchiveKind.ZIP
    if head[257:262] == b"ustar":
        return ArchiveKind.TAR
    return None


def _gunzip(path: Path, spend: Callable[[int], None]) -> Path:
    """Unpack beside `path`, so that a tar is always read from a seekable file of known size."""
    descriptor, name = tempfile.mkstemp(prefix="tar-", dir=path.parent)
    try:
        with gzip.open(path) as source, os.fdopen(descriptor, "wb") as out:
            while chunk := source.read(_CHUNK):
                spend(len(chunk))
                out.write(chunk)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InvalidAdapterError("upload", f"is not a whole gzip stream: {error}") from error
    return Path(name)


class _BoundedTarInfo(tarfile.TarInfo):
    """Refuses extended headers that tarfile would read into memory whole."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        info = super().frombuf(buf, encoding, errors)
        if info.type in _HEADER_TYPES and info.size > _MAX_TAR_HEADER:
            raise InvalidAdapterError("upload", "has an oversized tar header")
        return info


_HEADER_TYPES = (
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)


def _tar_members(tar: tarfile.TarFile, max_entries: int) -> Iterator[Member]:
    for count, info in enumerate(tar):
        if count >= max_entries:
            raise InvalidAdapterError("upload", f"has more than {max_entries} entries")
        yield Member(
            name=info.name,
            is_folder=info.isdir(),
            special=_tar_special(info),
            open=lambda info=info: cast(IO[bytes], tar.extractfile(info)),  # type: ignore[misc]
        )


def _tar_special(info: tarfile.TarInfo) -> str | None:
    if info.issym():
        return "symbolic link"
    if info.islnk():
        return "hard link"
    if info.isfifo():
        return "fifo"
    if info.isdev():
        return "device"
    if info.issparse():
        return "sparse file"
    if info.isdir() or info.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
        return None
    return "special entry"


@contextmanager
def _open_zip(path: Path, max_entries: int) -> Iterator[zipfile.ZipFile]:
    _check_zip_directory(path, max_entries)
    with zipfile.ZipFile(path) as archive:
        yield archive


def _check_zip_directory(path: Path, max_entries: int) -> None:
    """zipfile reads the central directory whole: bound what it claims to be first."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        start = max(0, size - _EOCD.size - (1 << 16) - 20)
        file.seek(start)
        tail = file.read()
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 or at + _EOCD.size > len(tail):
        raise InvalidAdapterError("upload", "is a zip without an end: was it cut off?")
    _, _, _, _, entries, directory_size, _, _ = _EOCD.unpack_from(tail, at)
    if tail[max(0, at - 20) : at].startswith(b"PK\x06\x07"):
        raise InvalidAdapterError("upload", "is a zip64; send a tar instead")
    if entries > max_entries or directory_size > _MAX_ZIP_DIRECTORY:
        raise InvalidAdapterError("upload", f"has more than {max_entries} entries")


def _zip_members(archive: zipfile.ZipFile) -> Iterator[Member]:
    for info in archive.infolist():
        yield Member(
            # zipfile rewrites what it finds odd in a name; what the archive says is what counts.
            name=info.orig_filename,
            is_folder=info.orig_filename.endswith("/"),
            special=_zip_special(info),
            open=lambda info=info: archive.open(info),  # type: ignore[misc]
        )


def _zip_special(info: zipfile.ZipInfo) -> str | None:
    if info.flag_bits & 0x1:
        return "encrypted entry"
    mode = info.external_attr >> 16
    kind = stat.S_IFMT(mode)
    if kind in (0, stat.S_IFREG, stat.S_IFDIR):
        return None
    return "symbolic link" if kind == stat.S_IFLNK else "special entry"
