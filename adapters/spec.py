"""What a PEFT config means here: which modules it adapts, at which rank and scale.

PEFT reads the config and PEFT's own functions match the names; `config_fields` says which fields
may reach this module.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from peft import LoraConfig
from peft.tuners.lora import LoraModel
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from polyloom.adapters.artifact import CONFIG_FILE
from polyloom.adapters.base_layout import BaseLayout, CheckpointModule, ModuleGroup
from polyloom.adapters.config_fields import check_fields
from polyloom.adapters.errors import InvalidAdapterError
from polyloom.adapters.naming import Naming
from polyloom.adapters.patterns import check_patterns

_ALL_LINEAR = "all-linear"
_EMBEDDING = "embed_tokens"


class AppliedFields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The meaning-bearing fields, with one form for each meaning: what the digest covers.

    Patterns stay in the order of the file, since the first that matches wins.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    target_modules: str | tuple[str, ...] | None
    exclude_modules: str | tuple[str, ...] | None
    layers_to_transform: tuple[int, ...] | None
    layers_pattern: tuple[str, ...] | None


@dataclass(frozen=True)
class TargetModule:
    """One linear of the base that the adapter adapts.

    name: as PEFT names it in the base, e.g. `model.layers.0.self_attn.q_proj`.
    layer: 0 for the head.  scale: what multiplies B·A.
    """

    name: str
    module: CheckpointModule
    layer: int
    rank: int
    alpha: float
    scale: float


@dataclass(frozen=True)
class LoraSpec:
    """A config that has been read and found applicable."""

    fields: AppliedFields
    base_name: str | None
    peft_version: str | None
    config: LoraConfig

    def targets(self, layout: BaseLayout, naming: Naming) -> tuple[TargetModule, ...]:
        """The modules that this config adapts in this base, by PEFT's own matching.

        `naming` is how the trainer's model named its modules; patterns are matched on those names.
        Raises InvalidAdapterError when none match, or one that matches cannot be adapted.
        """
        config = self._with_targets(layout, naming)
        names = [naming.trained(name) for name, _, _ in layout_modules(layout)]
        self._check_patterns([*names, naming.trained_embedding])
        if _matches(config, naming.trained_embedding):
            raise InvalidAdapterError("target_modules", f"{_EMBEDDING} cannot be adapted")
        targets = tuple(
            self._target(name, trained, module, layer)
            for (name, module, layer), trained in zip(layout_modules(layout), names, strict=True)
            if _matches(config, trained)
        )
        if not targets:
            raise InvalidAdapterError("target_modules", f"match no linear module of {layout.name}")
        return targets

    def _with_targets(self, layout: BaseLayout, naming: Naming) -> LoraConfig:
        """PEFT fills these two in from the model: the default by model type, and `all-linear`."""
        targets = self.config.target_modules
        if targets is None:
            targets = LoraModel.target_module_mapping.get(layout.model_type)
            if targets is None:
                raise InvalidAdapterError("target_modules", "is missing")
        if isinstance(targets, str) and targets.lower() == _ALL_LINEAR:
            targets = {
                naming.trained(name) for name, _, _ in layout_modules(layout) if name != naming.head
            }
        return replace(self.config, target_modules=targets)

    def _target(
        self, name: str, trained: str, module: CheckpointModule, layer: int
    ) -> TargetModule:
        ranks, alphas = dict(self.fields.rank_pattern), dict(self.fields.alpha_pattern)
        rank = ranks.get(get_pattern_key(ranks.keys(), trained), self.fields.r)
        alpha = alphas.get(get_pattern_key(alphas.keys(), trained), self.fields.lora_alpha)
        scale = alpha / math.sqrt(rank) if self.fields.use_rslora else alpha / rank
        if not math.isfinite(scale):
            raise InvalidAdapterError("lora_alpha", f"gives {name} no finite scale")
        return TargetModule(name, module, layer, rank, alpha, scale)

    def _check_patterns(self, names: Sequence[str]) -> None:
        fields = self.fields
        for field, patterns in (
            ("target_modules", fields.target_modules),
            ("exclude_modules", fields.exclude_modules),
        ):
            if isinstance(patterns, str):
                check_patterns(field, [patterns], names)
        check_patterns("rank_pattern", [key for key, _ in fields.rank_pattern], names)
        check_patterns("alpha_pattern", [key for key, _ in fields.alpha_pattern], names)
        check_patterns("layers_pattern", fields.layers_pattern or (), names)


def layout_modules(layout: BaseLayout) -> Iterator[tuple[str, CheckpointModule, int]]:
    """Every linear of the base: its full name, its table entry, its layer."""
    for module in layout.modules:
        if module.group is ModuleGroup.HEAD:
            yield module.path, module, 0
        else:
            for layer in range(layout.num_layers):
                yield f"{layout.layer_prefix}.{layer}.{module.path}", module, layer


def read_spec(folder: Path) -> LoraSpec:
    """Read `adapter_config.json` with PEFT. Raises InvalidAdapterError naming the field."""
    raw = _read_json(folder / CONFIG_FILE)
    check_fields(raw)
    config = _parse(folder)
    return LoraSpec(
        fields=_applied_fields(config),
        base_name=_optional_text("base_model_name_or_path", config.base_model_name_or_path),
        peft_version=_optional_text("peft_version", raw.get("peft_version")),
        config=config,
    )


def _matches(config: LoraConfig, name: str) -> bool:
    # PEFT answers with a match, a truth value, or an object that is false for excluded modules.
    return bool(check_target_module_exists(config, name))


def _read_json(path: Path) -> dict[str, object]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        raise InvalidAdapterError(CONFIG_FILE, "is missing") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidAdapterError(CONFIG_FILE, f"is not a JSON object: {error}") from error


def _parse(folder: Path) -> LoraConfig:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = LoraConfig.from_pretrained(str(folder))
    except Exception as error:  # PEFT raises whatever a wrong value happens to break
        raise InvalidAdapterError(CONFIG_FILE, f"PEFT cannot read it: {error}") from error
    return config


class _RawFields(msgspec.Struct, kw_only=True):
    """Types of the applied fields as PEFT documents them; PEFT itself checks none."""

    r: Annotated[int, msgspec.Meta(ge=1)]
    lora_alpha: float
    use_rslora: bool
    use_dora: bool
    lora_bias: bool
    rank_pattern: dict[str, Annotated[int, msgspec.Meta(ge=1)]] | None
    alpha_pattern: dict[str, float] | None
    target_modules: str | list[str] | None
    exclude_modules: str | list[str] | None
    layers_to_transform: int | list[int] | None
    layers_pattern: str | list[str] | None


def _applied_fields(config: LoraConfig) -> AppliedFields:
    raw = _typed_fields(config)
    layers = raw.layers_to_transform
    if isinstance(layers, int):
        layers = [layers]
    patterns = raw.layers_pattern
    if isinstance(patterns, str):
        patterns = [patterns]
    return AppliedFields(
        r=raw.r,
        lora_alpha=raw.lora_alpha,
        use_rslora=raw.use_rslora,
        use_dora=raw.use_dora,
        lora_bias=raw.lora_bias,
        rank_pattern=tuple((raw.rank_pattern or {}).items()),
        alpha_pattern=tuple((raw.alpha_pattern or {}).items()),
        target_modules=_sorted_names(raw.target_modules),
        exclude_modules=_sorted_names(raw.exclude_modules) or None,
        layers_to_transform=tuple(sorted(set(layers))) if layers else None,
        layers_pattern=tuple(patterns) if patterns else None,
    )


def _typed_fields(config: LoraConfig) -> _RawFields:
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(_RawFields):
        value = getattr(config, field.name)
        values[field.name] = list(value) if isinstance(value, set) else value
        try:
            msgspec.convert(values[field.name], field.type)
        except msgspec.ValidationError as error:
            raise InvalidAdapterError(field.name, f"has a wrong value: {error}") from error
    return msgspec.convert(values, _RawFields)


def _sorted_names(names: str | list[str] | None) -> str | tuple[str, ...] | None:
    return tuple(sorted(set(names))) if isinstance(names, list) else names


def _optional_text(field: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidAdapterError(field, "is not a text")
    return value or None
