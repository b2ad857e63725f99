"""The tensors of a PEFT checkpoint: where each lies, and which part of which module it is.

Only headers are read here; `Checkpoint.read` maps one tensor at a time. Names come as trainers
write them: with `base_model.model.`, with or without the adapter's name after `lora_A`, with the
wrappers of torch.compile, DDP or FSDP in the path, in one file or sharded under an index.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from polyloom.adapters.artifact import INDEX_FILE, SHARD_FILES, WEIGHTS_FILE
from polyloom.adapters.errors import InvalidAdapterError

DTYPES = ("F32", "BF16", "F16")

_WRAPPERS = frozenset({"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PEFT_PREFIX = "base_model.model."
_LORA_KEY = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_magnitude_vector)"
    r"(?:\.(?P<adapter>(?!weight$|bias$)[^.]+))?(?:\.(?P<kind>weight|bias))?"
)
_BASE_KEY = re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.weight")


class Part(StrEnum):
    """What a tensor is of its module; the values end its canonical name as PEFT saves it."""

    A = "lora_A.weight"
    B = "lora_B.weight"
    B_BIAS = "lora_B.bias"
    MAGNITUDE = "lora_magnitude_vector"
    BASE = "base_layer.weight"
    """A copy of the base's own weight, which PEFT saves beside a LoRA on the head."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as a file's header describes it. `module` is the trainer's name of its module."""

    key: str
    file: str
    module: str
    part: Part
    dtype: str
    shape: tuple[int, ...]


class _Slice(Protocol):
    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...


class TensorReader:
    """Reads tensors of one folder; holds its files open while the context of `reading` lasts."""

    def __init__(self, handles: dict[str, "_File"]) -> None:
        self._handles = handles

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor in its stored dtype, on the CPU."""
        return self._handles[entry.file].get_tensor(entry.key)


class _File(Protocol):
    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a folder, each understood."""

    folder: Path
    entries: tuple[TensorEntry, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The weight files, without the index."""
        return tuple(sorted({e.file for e in self.entries}))

    @contextmanager
    def reading(self) -> Iterator[TensorReader]:
        """Open the files for reading tensors one at a time."""
        yield TensorReader({name: _open(self.folder / name) for name in self.files})


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and check the headers. Raises InvalidAdapterError naming the file or tensor."""
    entries: list[TensorEntry] = []
    adapters: set[str] = set()
    for name, expected in _weight_files(folder).items():
        handle = _open(folder / name)
        keys = sorted(handle.keys())
        if expected is not None and set(keys) != expected:
            odd = min(set(keys) ^ expected)
            raise InvalidAdapterError(INDEX_FILE, f"does not agree with {name} about {odd}")
        for key in keys:
            entry, adapter = _entry(handle, name, key)
            entries.append(entry)
            if adapter is not None:
                adapters.add(adapter)
    if not entries:
        raise InvalidAdapterError(WEIGHTS_FILE, "holds no tensor")
    if len(adapters) > 1:
        named = ", ".join(sorted(adapters)[:5])
        raise InvalidAdapterError(WEIGHTS_FILE, f"holds several adapters: {named}")
    return Checkpoint(folder, tuple(entries))


def _weight_files(folder: Path) -> dict[str, set[str] | None]:
    """Weight files, each with the keys that an index promises in it (None without an index)."""
    single = (folder / WEIGHTS_FILE).exists()
    shards = {p.name for p in folder.iterdir() if SHARD_FILES.fullmatch(p.name)}
    indexed = (folder / INDEX_FILE).exists()
    if single and (shards or indexed):
        raise InvalidAdapterError(WEIGHTS_FILE, "is there beside shards: which one counts?")
    if single:
        return {WEIGHTS_FILE: None}
    if not indexed:
        missing = INDEX_FILE if shards else WEIGHTS_FILE
        raise InvalidAdapterError(missing, "is missing")
    promised = _read_index(folder / INDEX_FILE)
    if odd := sorted(set(promised) ^ shards):
        raise InvalidAdapterError(odd[0], f"{INDEX_FILE} and the files do not agree about it")
    return dict(promised)


def _read_index(path: Path) -> dict[str, set[str]]:
    try:
        index = json.loads(path.read_bytes())
        weight_map = index["weight_map"]
        pairs = [(str(key), str(file)) for key, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidAdapterError(INDEX_FILE, "has no readable weight_map") from error
    promised: dict[str, set[str]] = {}
    for key, file in pairs:
        promised.setdefault(file, set()).add(key)
    return promised


def _open(path: Path) -> "_File":
    try:
        handle: _File = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise InvalidAdapterError(path.name, f"is not a safetensors file: {error}") from error
    return handle


def _entry(handle: "_File", file: str, key: str) -> tuple[TensorEntry, str | None]:
    view = handle.get_slice(key)
    dtype, shape = view.get_dtype(), tuple(view.get_shape())
    if dtype not in DTYPES:
        raise InvalidAdapterError(key, f"has dtype {dtype}; {', '.join(DTYPES)} are read")
    module, part, adapter = _understand(key)
    return TensorEntry(key, file, module, part, dtype, shape), adapter


def _understand(key: str) -> tuple[str, Part, str | None]:
    """Module, part and the adapter's name if the key holds one."""
    plain = ".".join(c for c in key.split(".") if c not in _WRAPPERS).removeprefix(_PEFT_PREFIX)
    if match := _LORA_KEY.fullmatch(plain):
        part = _PARTS.get((match["part"], match["kind"]))
        if part is not None:
            return match["module"], part, match["adapter"]
    elif (match := _BASE_KEY.fullmatch(plain)) and "lora_" not in plain:
        return match["module"], Part.BASE, None
    raise InvalidAdapterError(key, "is no tensor of a LoRA on a linear module")


_PARTS = {
    ("lora_A", "weight"): Part.A,
    ("lora_B", "weight"): Part.B,
    ("lora_B", "bias"): Part.B_BIAS,
    ("lora_magnitude_vector", "weight"): Part.MAGNITUDE,
    ("lora_magnitude_vector", None): Part.MAGNITUDE,
}
