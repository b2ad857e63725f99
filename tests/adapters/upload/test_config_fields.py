"""Every field of PEFT's config is treated on purpose; what is not applied is refused by name."""

import dataclasses
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from polyloom.adapters.config_fields import FIELDS, Treatment
from polyloom.adapters.errors import InvalidAdapterError
from polyloom.adapters.naming import infer_naming
from polyloom.adapters.spec import AppliedFields, read_spec

REFUSED: dict[str, list[Any]] = {
    "task_type": ["SEQ_CLS", "SEQ_2_SEQ_LM"],
    "init_lora_weights": ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", 1],
    "bias": ["all", "lora_only"],
    "modules_to_save": [["lm_head"], ["embed_tokens", "lm_head"]],
    "trainable_token_indices": [[1, 2], {"embed_tokens": [5]}],
    "target_parameters": [["mlp.experts.gate_up_proj"]],
    "layer_replication": [[[0, 2], [1, 3]]],
    "alora_invocation_tokens": [[5, 6]],
    "use_qalora": [True],
    "use_bdlora": [{"target_modules_bd_a": ["q_proj"], "nblocks": 2}],
    "arrow_config": [{"top_k": 2}],
    "kasa_config": [{"beta": 0.1}],
    "monteclora_config": [{"num_samples": 4}],
    "megatron_config": [{"hidden_size": 4}],
    "ensure_weight_tying": [True],
}
WRONG: list[tuple[str, Any]] = [
    ("r", 0),
    ("r", -4),
    ("r", "8"),
    ("r", 8.5),
    ("r", True),
    ("lora_alpha", None),
    ("lora_alpha", "16"),
    ("use_rslora", 1),
    ("use_dora", "yes"),
    ("rank_pattern", {"q_proj": 0}),
    ("rank_pattern", {"q_proj": "4"}),
    ("rank_pattern", ["q_proj"]),
    ("alpha_pattern", {"q_proj": None}),
    ("target_modules", 5),
    ("target_modules", [1, 2]),
    ("layers_to_transform", "1"),
    ("peft_type", "LOHA"),
    ("peft_type", "IA3"),
    ("base_model_name_or_path", 7),
]


@pytest.fixture
def config_folder(tmp_path: Path) -> Callable[..., Path]:
    """A folder with a config as PEFT saves it, changed as asked."""

    def write(**changes: Any) -> Path:
        LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(str(tmp_path))
        path = tmp_path / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        return tmp_path

    return write


def test_the_table_is_pefts_own_field_list() -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(LoraConfig)}


def test_applied_fields_are_what_the_digest_covers() -> None:
    applied = {name for name, rule in FIELDS.items() if rule.treatment is Treatment.APPLIED}
    assert applied == set(AppliedFields.__struct_fields__)


def test_a_refusal_is_tried_for_every_field_that_must_be_neutral() -> None:
    neutral = {name for name, rule in FIELDS.items() if rule.treatment is Treatment.NEUTRAL_ONLY}
    assert neutral == set(REFUSED)


def test_pefts_defaults_are_neutral(config_folder: Callable[..., Path]) -> None:
    assert read_spec(config_folder()).fields.r == 4


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in REFUSED.items() for v in vs])
def test_what_is_not_applied_is_refused_by_name(
    field: str, value: Any, config_folder: Callable[..., Path]
) -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        read_spec(config_folder(**{field: value}))
    assert caught.value.param == field


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_wrong_values_are_refused_by_name(
    field: str, value: Any, config_folder: Callable[..., Path]
) -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        read_spec(config_folder(**{field: value}))
    assert caught.value.param in (field, "adapter_config.json")


def test_unknown_fields(config_folder: Callable[..., Path]) -> None:
    """Old configs carry empty fields that are gone; a value in one asks for something."""
    assert read_spec(config_folder(enable_lora=None, merge_weights=False)).fields.r == 4
    with pytest.raises(InvalidAdapterError) as caught:
        read_spec(config_folder(use_hyper_lora=True))
    assert caught.value.param == "use_hyper_lora"


@pytest.mark.parametrize("content", ["", "[]", "{", '"x"', "[" * 100_000, '{"r": NaN}'])
def test_a_config_that_is_no_object(tmp_path: Path, content: str) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(InvalidAdapterError) as caught:
        read_spec(tmp_path)
    assert caught.value.param == "adapter_config.json"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_modules", r"(.*.*.*.*.*.*.*.*.*.*)*x"),
        ("exclude_modules", r"([\w.]+)+!"),
        ("rank_pattern", {r"((a|[a-z_.0-9])+)+!": 4}),
        ("target_modules", "x" * 5_000),
        ("target_modules", "(unclosed"),
        ("alpha_pattern", {"[": 4}),
    ],
)
def test_patterns_that_never_end_or_mean_nothing(
    field: str, value: Any, config_folder: Callable[..., Path], make_base: Callable[..., Any]
) -> None:
    layout = make_base("llama").layout
    with pytest.raises(InvalidAdapterError) as caught:
        read_spec(config_folder(**{field: value})).targets(layout, infer_naming(layout, []))
    assert caught.value.param == field


@pytest.mark.parametrize("targets", [["embed_tokens"], ["q_proj", "embed_tokens"], r".*embed.*"])
def test_embeddings_are_refused(
    targets: Any, config_folder: Callable[..., Path], make_base: Callable[..., Any]
) -> None:
    layout = make_base("llama").layout
    with pytest.raises(InvalidAdapterError, match="embed_tokens") as caught:
        read_spec(config_folder(target_modules=targets)).targets(layout, infer_naming(layout, []))
    assert caught.value.param == "target_modules"


CONFIGS: list[dict[str, Any]] = [
    {"target_modules": None},
    {"target_modules": ["proj"]},
    {"target_modules": ["k_proj", "self_attn.q_proj", "model.layers.1.mlp.up_proj"]},
    {"target_modules": "all-linear"},
    {"target_modules": "ALL-LINEAR", "exclude_modules": ["down_proj"]},
    {"target_modules": r"(?i).*Q_PROJ"},
    {"target_modules": r"(?!.*layers\.1).*(q|v)_proj"},
    {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.(q_proj|down_proj)|lm_head"},
    {"target_modules": ["q_proj", "lm_head"], "layers_to_transform": [1]},
    {"target_modules": ["q_proj"], "layers_to_transform": 2, "layers_pattern": ["h", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["v_proj", "o_proj"], "exclude_modules": r".*layers\.[02].*"},
    {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"proj": 2, "q_proj": 3}},
    {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {r".*\.0\..*": 2, "q_proj": 3}},
    {"target_modules": ["q_proj"], "alpha_pattern": {"layers.1.self_attn.q_proj": 3}},
    {"target_modules": ["q_proj"], "rank_pattern": {"^q_proj": 9, r"q_proj$": 5}},
    {"target_modules": ["q_proj"], "use_rslora": True, "rank_pattern": {r"\d": 9, "q_.*": 5}},
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: re.sub(r"\W+", " ", str(c)))
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3"])
def test_targets_ranks_and_scales_are_pefts(
    config: dict[str, Any], family: str, make_base: Callable[..., Any], tmp_path: Path
) -> None:
    """PEFT puts the same config on the same model: the same modules, ranks and scales."""
    base = make_base(family)
    written = LoraConfig(r=6, lora_alpha=10, **config)
    written.save_pretrained(str(tmp_path))
    layout = base.layout
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            peft = get_peft_model(base.model, LoraConfig(r=6, lora_alpha=10, **config))
        except ValueError:
            peft = None
    if peft is None or not peft.base_model.targeted_module_names:
        with pytest.raises(InvalidAdapterError, match="target_modules"):
            read_spec(tmp_path).targets(layout, infer_naming(layout, []))
        return
    expected = {}
    for name in peft.base_model.targeted_module_names:
        module = peft.base_model.model.get_submodule(name)
        expected[name] = module.r["default"], module.scaling["default"]
    targets = read_spec(tmp_path).targets(layout, infer_naming(layout, []))
    assert {t.name: (t.rank, t.scale) for t in targets} == expected
