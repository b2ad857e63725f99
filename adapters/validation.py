"""Whether a folder may become a revision, and its weights in the form that residency loads.

Both read the same inspection and the same digest: what was accepted is what is served.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from polyloom.adapters.base_layout import BaseLayout, ModuleGroup
from polyloom.adapters.base_name import same_base
from polyloom.adapters.checkpoint import Part, TensorEntry, TensorReader
from polyloom.adapters.digest import RevisionDigest
from polyloom.adapters.errors import CorruptAdapterError, InvalidAdapterError
from polyloom.adapters.inspection import Inspection, ModuleTensors, inspect_folder
from polyloom.adapters.shipped_text import check_shipped_text
from polyloom.adapters.spec import TargetModule
from polyloom.adapters.weights import AdapterWeights, BaseWeights, LoraTerm, RowTerm

_ROWS_AT_ONCE = 4_096


@dataclass(frozen=True)
class ValidationLimits:
    """max_rank: the largest rank of any module."""

    max_rank: int = 256


@dataclass(frozen=True, kw_only=True)
class ValidatedAdapter:
    """What an accepted folder holds.

    rank: largest of any module.  target_modules: module paths within a layer (`self_attn.q_proj`),
    or the head's.  dtypes: as stored.  num_bytes: of all its files.
    """

    digest: str
    rank: int
    target_modules: tuple[str, ...]
    dtypes: tuple[str, ...]
    num_bytes: int
    files: tuple[str, ...]
    base_name: str | None
    peft_version: str | None
    uses_rslora: bool
    uses_dora: bool
    uses_lora_bias: bool
    has_tokenizer: bool
    has_template: bool


def validate(
    folder: Path, layout: BaseLayout, base: BaseWeights, limits: ValidationLimits
) -> ValidatedAdapter:
    """Check a staged folder whole. Reads every tensor once, one at a time.

    Raises InvalidAdapterError naming the file, field or tensor that is wrong.
    """
    inspection = inspect_folder(folder, layout)
    _check_base_name(inspection, layout)
    _check_ranks(inspection, limits)
    shipped = check_shipped_text(folder, layout.vocab_size)
    digest = _checked_digest(inspection)
    _check_base_copies(inspection, layout, base)
    fields = inspection.spec.fields
    files = sorted(folder.iterdir())
    return ValidatedAdapter(
        digest=digest,
        rank=max(m.target.rank for m in inspection.modules),
        target_modules=tuple(sorted({m.target.module.path for m in inspection.modules})),
        dtypes=tuple(sorted({entry.dtype for _, entry in inspection.tensors()})),
        num_bytes=sum(p.stat().st_size for p in files),
        files=tuple(p.name for p in files),
        base_name=inspection.spec.base_name,
        peft_version=inspection.spec.peft_version,
        uses_rslora=fields.use_rslora,
        uses_dora=fields.use_dora,
        uses_lora_bias=fields.lora_bias,
        has_tokenizer=shipped.has_tokenizer,
        has_template=shipped.has_template,
    )


def load_adapter_weights(
    folder: Path, layout: BaseLayout, base: BaseWeights, expected_digest: str | None
) -> AdapterWeights:
    """Read a revision's folder into rank and row terms, as fp32.

    The scale, and DoRA's magnitude ratio, are folded into b. expected_digest: None for a folder
    that has no identity yet. Raises CorruptAdapterError when the content is not that digest's,
    InvalidAdapterError without one, OSError when the folder cannot be read.
    """
    try:
        inspection = inspect_folder(folder, layout)
        tensors, digest = _read_all(inspection)
    except InvalidAdapterError as error:
        if expected_digest is None:
            raise
        raise CorruptAdapterError(expected_digest, str(error)) from error
    if expected_digest not in (None, digest):
        raise CorruptAdapterError(str(expected_digest), f"the stored files are {digest}")
    terms: list[LoraTerm] = []
    rows: list[RowTerm] = []
    for module in inspection.modules:
        term, row = _effective(module, tensors, base)
        terms.append(term)
        if row is not None:
            rows.append(row)
    return AdapterWeights(digest=digest, terms=tuple(terms), rows=tuple(rows))


def _check_base_name(inspection: Inspection, layout: BaseLayout) -> None:
    named = inspection.spec.base_name
    known = (layout.name, *layout.other_names)
    if named is not None and not any(same_base(named, name) for name in known):
        raise InvalidAdapterError(
            "base_model_name_or_path",
            f"is {named!r}; this base is {layout.name!r} (if it is the same, name it so, or null)",
        )


def _check_ranks(inspection: Inspection, limits: ValidationLimits) -> None:
    for module in inspection.modules:
        if module.target.rank > limits.max_rank:
            message = f"gives {module.target.name} rank {module.target.rank}"
            raise InvalidAdapterError("r", f"{message}; the limit is {limits.max_rank}")


def _checked_digest(inspection: Inspection) -> str:
    digest = RevisionDigest(inspection.spec.fields)
    with inspection.checkpoint.reading() as reader:
        for name, entry in inspection.tensors():
            tensor = reader.read(entry)
            if not torch.isfinite(tensor).all():
                raise InvalidAdapterError(entry.key, "has values that are not finite")
            digest.add_tensor(name, entry.dtype, tensor)
    return _finish(digest, inspection)


_Tensors = dict[str, torch.Tensor]


def _read_all(inspection: Inspection) -> tuple[_Tensors, str]:
    """The adapter's tensors by canonical name, as fp32, and the digest of what was read."""
    digest = RevisionDigest(inspection.spec.fields)
    tensors: _Tensors = {}
    with inspection.checkpoint.reading() as reader:
        for name, entry in inspection.tensors():
            tensor = reader.read(entry)
            digest.add_tensor(name, entry.dtype, tensor)
            # PEFT computes with adapters cast to fp32 as well (`autocast_adapter_dtype`).
            tensors[name] = tensor.float()
    return tensors, _finish(digest, inspection)


def _finish(digest: RevisionDigest, inspection: Inspection) -> str:
    for path in inspection.files:
        digest.add_file(path)
    return digest.value()


def _effective(
    module: ModuleTensors, tensors: _Tensors, base: BaseWeights
) -> tuple[LoraTerm, RowTerm | None]:
    """`y += s·B(Ax) + s·bias`, or with DoRA `y = g·Wx + bias + g·s·B(Ax)`, g = m / ‖W + s·BA‖."""
    named = {entry.part: tensors[name] for name, entry in module.named()}
    target = module.target
    table, layer = target.module, target.layer
    a, b = named[Part.A], named[Part.B] * target.scale
    gain = shift = None
    if module.magnitude is not None:
        gain = _dora_gain(target, named[Part.MAGNITUDE], a, b, base)
        b = gain[:, None] * b
    if module.bias is not None:
        shift = named[Part.B_BIAS] * target.scale
    term = LoraTerm(table.group, layer, table.offset, a, b)
    if gain is None and shift is None:
        return term, None
    return term, RowTerm(table.group, layer, table.offset, gain, shift)


def _dora_gain(
    target: TargetModule,
    magnitude: torch.Tensor,
    a: torch.Tensor,
    scaled_b: torch.Tensor,
    base: BaseWeights,
) -> torch.Tensor:
    """m / ‖W + s·B·A‖ by output row in fp32 (`peft.tuners.lora.dora.DoraLinearLayer.forward`).

    W is read some rows at a time: a head has too many to hold twice.
    """
    module = target.module
    norms = torch.empty(module.out_features)
    for start in range(0, module.out_features, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, module.out_features - start)
        weight = base.rows(module.group, target.layer, module.offset + start, count)
        adapted = weight.cpu() + scaled_b[start : start + count] @ a
        norms[start : start + count] = torch.linalg.norm(adapted, dim=1)
    gain = magnitude / norms
    if not torch.isfinite(gain).all():
        raise InvalidAdapterError(
            f"{target.name}.{Part.MAGNITUDE}", "meets a row of the adapted weight that is zero"
        )
    return gain


def _check_base_copies(inspection: Inspection, layout: BaseLayout, base: BaseWeights) -> None:
    """PEFT would load such a tensor into the base: it may only repeat what is there."""
    head = inspection.naming.head
    repeats_head = {head, inspection.naming.embedding} if layout.tied_head else {head}
    with inspection.checkpoint.reading() as reader:
        for name, entry in inspection.base_copies:
            if name not in repeats_head:
                raise InvalidAdapterError(entry.key, "replaces a weight of the base")
            _check_head_copy(entry, reader, layout, base)


def _check_head_copy(
    entry: TensorEntry, reader: TensorReader, layout: BaseLayout, base: BaseWeights
) -> None:
    shape = layout.vocab_size, layout.hidden_size
    if entry.shape != shape:
        message = f"has shape {list(entry.shape)}, the base's is {list(shape)}: added tokens?"
        raise InvalidAdapterError(entry.key, message)
    copy = reader.read(entry)
    for start in range(0, layout.vocab_size, _ROWS_AT_ONCE):
        part = copy[start : start + _ROWS_AT_ONCE]
        rows = base.rows(ModuleGroup.HEAD, 0, start, part.shape[0]).cpu()
        if not torch.equal(rows.to(part.dtype), part):
            raise InvalidAdapterError(entry.key, "differs from the base's own weight")
