"""The tensors of a draft head: which there must be, reading and writing them, its digest."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from polyloom.adapters.digest import RevisionDigest
from polyloom.adapters.draft_heads.config import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    DraftHeadConfig,
    applied_fields,
    read_config,
)
from polyloom.adapters.draft_heads.layout import linear_sizes
from polyloom.adapters.errors import InvalidAdapterError

DIGEST_FORMAT = b"polyloom draft head 1"
NORMS = ("hidden_norm", "embed_norm", "mlp_norm", "norm")

_FLOATS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_NAMES = _FLOATS | {torch.int64: "I64", torch.bool: "BOOL"}


@dataclass(frozen=True)
class DraftHead:
    """A head's config, its tensors by name as stored, and the digest of both."""

    config: DraftHeadConfig
    tensors: dict[str, torch.Tensor]
    digest: str


def expected_shapes(config: DraftHeadConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a head of this config has."""
    shapes: dict[str, tuple[int, ...]] = {
        "d2t": (config.draft_vocab_size,),
        "t2d": (config.vocab_size,),
    }
    for name, (inputs, outputs) in linear_sizes(config).items():
        if config.rank is not None:
            shapes[f"{name}.lora_A.weight"] = (config.rank, inputs)
            shapes[f"{name}.lora_B.weight"] = (outputs, config.rank)
        elif name != "lm_head":
            shapes[f"{name}.weight"] = (outputs, inputs)
    if config.is_shared:
        shapes |= {f"{name}.weight": (config.hidden_size,) for name in NORMS}
    return shapes


def read_draft_head(folder: Path) -> DraftHead:
    """Read and check a head for itself, its digest included.

    Raises InvalidAdapterError naming the file, field or tensor that is wrong.
    """
    config = read_config(folder)
    tensors = _read_tensors(folder / WEIGHTS_FILE, expected_shapes(config))
    _check_vocabulary(config, tensors)
    return DraftHead(config, tensors, _digest(config, tensors))


def save_draft_head(
    folder: Path, config: DraftHeadConfig, tensors: dict[str, torch.Tensor]
) -> DraftHead:
    """Write a head and read it back: what was saved is what will be loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / WEIGHTS_FILE)
    encoded = msgspec.json.format(msgspec.json.encode(config), indent=2)
    (folder / CONFIG_FILE).write_bytes(encoded + b"\n")
    return read_draft_head(folder)


def draft_vocabulary(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Target ids of a head's draft ids, `[draft_vocab]` int64: `i + d2t[i]`."""
    d2t = tensors["d2t"]
    return torch.arange(len(d2t)) + d2t


def vocabulary_tensors(target_ids: torch.Tensor, vocab_size: int) -> dict[str, torch.Tensor]:
    """`d2t` and `t2d` of a draft vocabulary, given by its target ids."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[target_ids] = True
    return {"d2t": target_ids - torch.arange(len(target_ids)), "t2d": mask}


def _read_tensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    if not path.is_file():
        raise InvalidAdapterError(path.name, "is missing")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = set(file.keys())
            for name in sorted(shapes.keys() - names):
                raise InvalidAdapterError(name, f"is missing in {path.name}")
            for name in sorted(names - shapes.keys()):
                raise InvalidAdapterError(name, "is no tensor of a draft head of this config")
            tensors: dict[str, torch.Tensor] = {}
            for name, shape in shapes.items():
                found = tuple(file.get_slice(name).get_shape())
                if found != shape:
                    message = f"has shape {list(found)}; the config asks for {list(shape)}"
                    raise InvalidAdapterError(name, message)
                tensors[name] = file.get_tensor(name)
    except SafetensorError as error:
        raise InvalidAdapterError(path.name, f"is not a safetensors file: {error}") from error
    for name, tensor in tensors.items():
        _check_values(name, tensor)
    return tensors


def _check_values(name: str, tensor: torch.Tensor) -> None:
    wanted = {"d2t": {torch.int64}, "t2d": {torch.bool}}.get(name, _FLOATS.keys())
    if tensor.dtype not in wanted:
        names = ", ".join(_NAMES[dtype] for dtype in wanted)
        raise InvalidAdapterError(name, f"has dtype {tensor.dtype}; {names} is read")
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise InvalidAdapterError(name, "has values that are not finite")


def _check_vocabulary(config: DraftHeadConfig, tensors: dict[str, torch.Tensor]) -> None:
    ids = draft_vocabulary(tensors)
    inside = bool((ids >= 0).all() and (ids < config.vocab_size).all())
    if not inside or len(set(ids.tolist())) < len(ids):
        raise InvalidAdapterError(
            "d2t", "must lead to different ids of the vocabulary: target id = i + d2t[i]"
        )
    if not torch.equal(vocabulary_tensors(ids, config.vocab_size)["t2d"], tensors["t2d"]):
        raise InvalidAdapterError("t2d", "is not the mask of the ids that d2t leads to")


def _digest(config: DraftHeadConfig, tensors: dict[str, torch.Tensor]) -> str:
    digest = RevisionDigest(applied_fields(config), DIGEST_FORMAT)
    for name in sorted(tensors):
        digest.add_tensor(name, _NAMES[tensors[name].dtype], tensors[name])
    return digest.value()
