"""An adapter's folder, understood against one base: every tensor has its place in a module.

Reads the config and the tensors' headers, not the tensors. What is checked here holds again each
time the folder is read, at upload and at every load.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from polyloom.adapters.artifact import CONFIG_FILE, INDEX_FILE, is_kept
from polyloom.adapters.base_layout import BaseLayout
from polyloom.adapters.checkpoint import Checkpoint, Part, TensorEntry, read_checkpoint
from polyloom.adapters.errors import InvalidAdapterError
from polyloom.adapters.naming import Naming, infer_naming
from polyloom.adapters.spec import LoraSpec, TargetModule, read_spec

_SHOWN = 5


@dataclass(frozen=True)
class ModuleTensors:
    """The tensors of one adapted module, shapes checked.

    a: [rank, in];  b: [out, rank];  bias, magnitude: [out] or absent.
    """

    target: TargetModule
    a: TensorEntry
    b: TensorEntry
    bias: TensorEntry | None
    magnitude: TensorEntry | None

    def named(self) -> Iterator[tuple[str, TensorEntry]]:
        """Each tensor under its canonical name."""
        for entry in (self.a, self.b, self.bias, self.magnitude):
            if entry is not None:
                yield f"{self.target.name}.{entry.part}", entry


@dataclass(frozen=True)
class Inspection:
    """What a folder is.

    modules: in the order of the base.  base_copies: tensors that repeat the base's own weight, by
    the base's name of the module; they are no part of the adapter, and must equal the base's.
    files: shipped files beside config and weights, by name.
    """

    spec: LoraSpec
    naming: Naming
    checkpoint: Checkpoint
    modules: tuple[ModuleTensors, ...]
    base_copies: tuple[tuple[str, TensorEntry], ...]
    files: tuple[Path, ...]

    def tensors(self) -> list[tuple[str, TensorEntry]]:
        """The adapter's tensors by canonical name, in the digest's order."""
        return sorted(pair for module in self.modules for pair in module.named())


def inspect_folder(folder: Path, layout: BaseLayout) -> Inspection:
    """Understand a folder. Raises InvalidAdapterError naming the file, field or tensor."""
    spec = read_spec(folder)
    checkpoint = read_checkpoint(folder)
    naming = infer_naming(layout, (e.module for e in checkpoint.entries))
    targets = spec.targets(layout, naming)
    tensors = _by_place(checkpoint.entries, naming)
    modules = tuple(_take(target, tensors, spec) for target in targets)
    copies = [place for place in tensors if place[1] is Part.BASE]
    base_copies = tuple((name, tensors.pop((name, part))) for name, part in sorted(copies))
    _refuse_left_over(tensors.values())
    return Inspection(spec, naming, checkpoint, modules, base_copies, _other_files(folder))


_Places = dict[tuple[str, Part], TensorEntry]


def _by_place(entries: Iterable[TensorEntry], naming: Naming) -> _Places:
    places: _Places = {}
    for entry in entries:
        place = naming.canonical(entry.module), entry.part
        if place in places:
            message = f"is the same tensor as {places[place].key}"
            raise InvalidAdapterError(entry.key, message)
        places[place] = entry
    return places


def _take(target: TargetModule, tensors: _Places, spec: LoraSpec) -> ModuleTensors:
    """Remove the target's tensors from `tensors`, checking that they are all there and fit."""
    module, rank = target.module, target.rank
    rows = (module.out_features,)
    fields = spec.fields
    return ModuleTensors(
        target=target,
        a=_pop(tensors, target, Part.A, (rank, module.in_features)),
        b=_pop(tensors, target, Part.B, (module.out_features, rank)),
        bias=_pop(tensors, target, Part.B_BIAS, rows) if fields.lora_bias else None,
        magnitude=_pop(tensors, target, Part.MAGNITUDE, rows) if fields.use_dora else None,
    )


def _pop(tensors: _Places, target: TargetModule, part: Part, shape: tuple[int, ...]) -> TensorEntry:
    entry = tensors.pop((target.name, part), None)
    if entry is None:
        name = f"{target.name}.{part}"
        raise InvalidAdapterError(name, "is missing, although the config adapts this module")
    if entry.shape != shape:
        message = f"has shape {list(entry.shape)}; base and config ask for {list(shape)}"
        raise InvalidAdapterError(entry.key, message)
    return entry


def _refuse_left_over(entries: Iterable[TensorEntry]) -> None:
    keys = sorted(e.key for e in entries)
    if not keys:
        return
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    message = f"no module that the config adapts in this base: {', '.join(keys[:_SHOWN])}{more}"
    raise InvalidAdapterError(keys[0], message)


def _other_files(folder: Path) -> tuple[Path, ...]:
    weights = (CONFIG_FILE, INDEX_FILE)
    kept = (p for p in folder.iterdir() if is_kept(p.name) and p.suffix != ".safetensors")
    return tuple(sorted(p for p in kept if p.name not in weights))
