"""A base's identity: what its config means and what its weight files hold."""

import hashlib
import json
import tempfile
from pathlib import Path

import msgspec

from polyloom.platform.engine.model.checkpoint import weight_files

BOOKKEEPING = frozenset(
    [
        "_name_or_path",
        "transformers_version",
        "use_cache",
        "torch_dtype",
        "dtype",
        "initializer_range",
        "unsloth_version",
        "unsloth_fixed",
    ]
)
"""Config fields that change nothing a base computes."""

CHUNK = 1 << 20


class FileDigest(msgspec.Struct, frozen=True):
    """SHA-256 of a file as it was at a size and time; a changed file is read again."""

    size: int
    mtime_ns: int
    sha256: str


def base_digest(folder: Path, sidecars: Path) -> str:
    """`sha256:<hex>` over the config's meaning and the content of every weight file, in order.

    sidecars: folder where file digests are remembered, so that only the first start reads all
    weights; the base's own folder is never written to.
    """
    config = json.loads((folder / "config.json").read_text())
    meaning = {key: value for key, value in config.items() if key not in BOOKKEEPING}
    digest = hashlib.sha256(b"polyloom base 1\n")
    digest.update(json.dumps(meaning, sort_keys=True, separators=(",", ":")).encode())
    for sha256 in _weight_digests(folder, sidecars):
        digest.update(b"\n" + sha256.encode())
    return f"sha256:{digest.hexdigest()}"


def file_sha256(file: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _weight_digests(folder: Path, sidecars: Path) -> list[str]:
    identity = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]
    sidecar = sidecars / f"{identity}.json"
    known = _read_sidecar(sidecar)
    current: dict[str, FileDigest] = {}
    for file in weight_files(folder):
        stat = file.stat()
        entry = known.get(file.name)
        if entry is None or (entry.size, entry.mtime_ns) != (stat.st_size, stat.st_mtime_ns):
            entry = FileDigest(stat.st_size, stat.st_mtime_ns, file_sha256(file))
        current[file.name] = entry
    if current != known:
        _write_sidecar(sidecar, current)
    return [entry.sha256 for entry in current.values()]


def _read_sidecar(sidecar: Path) -> dict[str, FileDigest]:
    try:
        return msgspec.json.decode(sidecar.read_bytes(), type=dict[str, FileDigest])
    except (OSError, msgspec.DecodeError):
        return {}


def _write_sidecar(sidecar: Path, digests: dict[str, FileDigest]) -> None:
    sidecar.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=sidecar.parent, delete=False) as partial:
        partial.write(msgspec.json.encode(digests))
    Path(partial.name).replace(sidecar)
