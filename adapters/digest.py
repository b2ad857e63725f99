"""The identity of a revision: SHA-256 over what it means, not over how it was packed.

Covered, each field framed by its length: the applied config fields as canonical JSON; every tensor
in order of its canonical name with dtype, shape and bytes; every other shipped file by name and
bytes (tokenizer, templates, generation defaults). Archive kind, file order, sharding, the trainer's
prefixes and README change nothing.
"""

import hashlib
import json
from pathlib import Path

import msgspec
import torch

_FORMAT = b"polyloom adapter revision 1"
_CHUNK = 1 << 20


class RevisionDigest:
    """Accumulates one digest: the fields first, then tensors in order, then files in order."""

    def __init__(self, fields: msgspec.Struct, form: bytes = _FORMAT) -> None:
        """fields: those of the config that mean something. form: what kind of content it is."""
        self._hash = hashlib.sha256()
        self._frame(form)
        self._frame(_canonical_json(msgspec.to_builtins(fields)))

    def add_tensor(self, name: str, dtype: str, tensor: torch.Tensor) -> None:
        """name: canonical. dtype: as safetensors spells it. tensor: contiguous, on the CPU."""
        self._frame(b"tensor")
        self._frame(_canonical_json([name, dtype, list(tensor.shape)]))
        data = tensor.contiguous().view(torch.uint8).numpy().data
        self._length(data.nbytes)
        self._hash.update(data)

    def add_file(self, path: Path) -> None:
        """A shipped file that is neither the config nor weights."""
        self._frame(b"file")
        self._frame(path.name.encode())
        self._length(path.stat().st_size)
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                self._hash.update(chunk)

    def value(self) -> str:
        """`sha256:<hex>`."""
        return f"sha256:{self._hash.hexdigest()}"

    def _frame(self, data: bytes) -> None:
        self._length(len(data))
        self._hash.update(data)

    def _length(self, size: int) -> None:
        self._hash.update(size.to_bytes(8, "big"))


def _canonical_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
