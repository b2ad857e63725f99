"""Safetensors files of a Hugging Face folder, read tensor by tensor through the page cache."""

import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from polyloom.platform.engine.model.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The checkpoint's safetensors files: the single one, or the shards that the index names.

    Raises CheckpointError if there are none, or a shard is missing.
    """
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    if not (folder / INDEX_FILE).is_file():
        raise CheckpointError(
            str(folder), f"neither {SINGLE_FILE} nor {INDEX_FILE}; only safetensors are loaded"
        )
    names = sorted(set(_shard_of_tensor(folder).values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(name, f"named by {INDEX_FILE}, but not in the folder")
    return tuple(folder / name for name in names)


def _shard_of_tensor(folder: Path) -> dict[str, str]:
    try:
        weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        return {str(tensor): str(shard) for tensor, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(INDEX_FILE, f"no readable weight_map: {error}") from error


class SafetensorsHandle(Protocol):
    """What is used of `safetensors.safe_open`, which is untyped."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class Checkpoint:
    """Named tensors over one or several mapped files; remembers which were read.

    Tensors are views of the files: a caller that keeps one as it is holds no memory of its own,
    and must not write into it. Reading from several threads is safe.
    """

    def __init__(self, folder: Path) -> None:
        self._handle_of: dict[str, SafetensorsHandle] = {}
        self._read: set[str] = set()
        for file in weight_files(folder):
            self._open(file)

    def _open(self, file: Path) -> None:
        try:
            handle: SafetensorsHandle = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(file.name, f"unreadable safetensors file: {error}") from error
        for name in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            if name in self._handle_of:
                raise CheckpointError(name, f"in {file.name} and in another file")
            self._handle_of[name] = handle

    def __contains__(self, name: str) -> bool:
        return name in self._handle_of

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`; raises CheckpointError if it is missing, misshapen or not a float."""
        if name not in self._handle_of:
            raise CheckpointError(name, "missing from the checkpoint")
        tensor = self._handle_of[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(name, f"shape {tuple(tensor.shape)}, the config needs {shape}")
        if tensor.dtype not in FLOAT_DTYPES:
            raise CheckpointError(name, f"dtype {tensor.dtype}; loaded are fp32, fp16 and bf16")
        self._read.add(name)
        return tensor

    def unread(self) -> tuple[str, ...]:
        """Names that nobody has asked for, sorted."""
        return tuple(sorted(set(self._handle_of) - self._read))
