"""How every field of `peft.LoraConfig` is treated: one table, and the check that refuses by it.

A field that is not in the table is refused by name, because nobody can say that ignoring it leaves
the logits as PEFT computes them. A test holds the table to the fields of the installed PEFT.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from polyloom.adapters.errors import InvalidAdapterError


class Treatment(Enum):
    """How a config field is treated."""

    APPLIED = auto()
    """Read, and acted on as PEFT does."""
    CHECKED = auto()
    """Identifies the base or the method; compared, not applied."""
    NEUTRAL_ONLY = auto()
    """Would change what PEFT computes in a way that is not applied: only listed values pass."""
    IGNORED = auto()
    """Changes nothing in a forward pass over a saved adapter of linear modules."""


@dataclass(frozen=True)
class FieldRule:
    """Treatment of one field, and the values that pass when it must be neutral."""

    treatment: Treatment
    neutral: tuple[object, ...] = ()


_APPLIED = FieldRule(Treatment.APPLIED)
_CHECKED = FieldRule(Treatment.CHECKED)
_IGNORED = FieldRule(Treatment.IGNORED)
_ABSENT = FieldRule(Treatment.NEUTRAL_ONLY, (None, [], {}))
_OFF = FieldRule(Treatment.NEUTRAL_ONLY, (False, None))

FIELDS: dict[str, FieldRule] = {
    "peft_type": _CHECKED,
    "task_type": FieldRule(Treatment.NEUTRAL_ONLY, (None, "CAUSAL_LM", "FEATURE_EXTRACTION")),
    "base_model_name_or_path": _CHECKED,
    "r": _APPLIED,
    "lora_alpha": _APPLIED,
    "use_rslora": _APPLIED,
    "rank_pattern": _APPLIED,
    "alpha_pattern": _APPLIED,
    "target_modules": _APPLIED,
    "exclude_modules": _APPLIED,
    "layers_to_transform": _APPLIED,
    "layers_pattern": _APPLIED,
    "use_dora": _APPLIED,
    "lora_bias": _APPLIED,
    # These draw the initial values; a saved adapter replaces them. The other values (PiSSA, OLoRA,
    # CorDA, LoftQ, LoRA-GA) also change the base's weights when PEFT loads the adapter.
    "init_lora_weights": FieldRule(
        Treatment.NEUTRAL_ONLY, (True, False, None, "gaussian", "eva", "orthogonal", "mica")
    ),
    "bias": FieldRule(Treatment.NEUTRAL_ONLY, ("none",)),
    "modules_to_save": _ABSENT,
    "trainable_token_indices": _ABSENT,
    "target_parameters": _ABSENT,
    "layer_replication": _ABSENT,
    "alora_invocation_tokens": _ABSENT,
    "use_qalora": _OFF,
    "use_bdlora": _ABSENT,
    "arrow_config": _ABSENT,
    "kasa_config": _ABSENT,
    "monteclora_config": _ABSENT,
    "megatron_config": _ABSENT,
    "ensure_weight_tying": _OFF,
    "velora_config": _IGNORED,  # changes the backward pass only
    "lora_dropout": _IGNORED,
    "inference_mode": _IGNORED,
    "auto_mapping": _IGNORED,
    "peft_version": _IGNORED,
    "revision": _IGNORED,
    "runtime_config": _IGNORED,
    "loftq_config": _IGNORED,  # read by PEFT only with init_lora_weights="loftq"
    "eva_config": _IGNORED,
    "corda_config": _IGNORED,
    "lora_ga_config": _IGNORED,
    "megatron_core": _IGNORED,
    "qalora_group_size": _IGNORED,
    # PEFT switches it off for nn.Linear, with a warning; no module here is a Conv1D.
    "fan_in_fan_out": _IGNORED,
}


def check_fields(raw: Mapping[str, object]) -> None:
    """Raise InvalidAdapterError naming a field of the raw config that is not applied."""
    if raw.get("peft_type") != "LORA":
        raise InvalidAdapterError("peft_type", f"is {raw.get('peft_type')!r}; LORA is served")
    for name, value in raw.items():
        rule = FIELDS.get(name)
        if rule is None:
            # Fields of other PEFT versions: nothing asked for is nothing lost.
            if not _one_of(value, (None, False, [], {}, "")):
                raise InvalidAdapterError(
                    name, "is not a field of this PEFT; its effect is unknown"
                )
        elif rule.treatment is Treatment.NEUTRAL_ONLY and not _one_of(value, rule.neutral):
            allowed = " or ".join(json.dumps(v) for v in rule.neutral)
            raise InvalidAdapterError(name, f"is not applied; it must be {allowed}")


def _one_of(value: object, allowed: Iterable[object]) -> bool:
    # 0 == False and 1 == True in Python; in a config they are different values.
    return any(type(value) is type(a) and value == a for a in allowed)
