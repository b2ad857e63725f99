"""An adapter's or a draft head's folder, or a packed one, as the body of an upload."""

import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import rich_click as click

ADAPTER_CONFIG = "adapter_config.json"
HEAD_CONFIG = "config.json"
KEPT_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt")
ARCHIVE_TYPES = {
    ".zip": "application/zip",
    ".tar": "application/x-tar",
    ".gz": "application/gzip",
    ".tgz": "application/gzip",
}


@dataclass(frozen=True)
class PackedFolder:
    """An open file, its size in bytes and its content type."""

    file: IO[bytes]
    size: int
    content_type: str


@contextmanager
def packed(path: Path, config: str = ADAPTER_CONFIG) -> Iterator[PackedFolder]:
    """An archive as it is, or a folder packed into a temporary tar. config: the file that the folder
    must hold."""
    if path.is_file():
        kind = ARCHIVE_TYPES.get(path.suffix.lower())
        if kind is None:
            raise click.ClickException(f"{path} is neither a folder nor a .tar, .tar.gz or .zip")
        with path.open("rb") as file:
            yield PackedFolder(file, path.stat().st_size, kind)
        return
    with tempfile.TemporaryFile() as file:
        _pack_folder(path, config, file)
        size = file.tell()
        file.seek(0)
        yield PackedFolder(file, size, "application/x-tar")


def _pack_folder(path: Path, config: str, out: IO[bytes]) -> None:
    files = [p for p in sorted(path.iterdir()) if p.is_file() and _is_kept(p.name)]
    if config not in {p.name for p in files}:
        raise click.ClickException(f"{path} holds no {config}: not what is uploaded here")
    with tarfile.open(fileobj=out, mode="w") as archive:
        for file in files:
            archive.add(file.resolve(), arcname=file.name, recursive=False)


def _is_kept(name: str) -> bool:
    """Optimizer states and logs stay at home; unreadable weights go, so that the server says why."""
    return name.endswith(KEPT_SUFFIXES) or name.startswith("adapter_model")
