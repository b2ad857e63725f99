"""Tensors as trainers name and shard them; whatever does not fit is refused naming it."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from polyloom.adapters.errors import InvalidAdapterError
from polyloom.adapters.validation import (
    ValidatedAdapter,
    ValidationLimits,
    load_adapter_weights,
    validate,
)

TARGETS = ["q_proj", "v_proj", "down_proj"]
LIMITS = ValidationLimits()


@pytest.fixture
def plain(base: Any, train: Callable[..., Any]) -> Any:
    """An ordinary adapter on three modules, and the base without it."""
    base = type(base)(copy.deepcopy(base.model), base.layout)
    trained = train(base, r=4, lora_alpha=6, target_modules=TARGETS)
    return type(base)(trained.peft.unload(), base.layout), trained


def check(base: Any, folder: Path) -> ValidatedAdapter:
    return validate(folder, base.layout, base, LIMITS)


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def infix(name: str) -> str:
    return re.sub(r"\.(lora_[AB])\.", r".\1.default.", name)


NAMINGS: dict[str, Callable[[str], str]] = {
    "adapter name kept": infix,
    "another adapter name": lambda n: infix(n).replace("default", "sft_run-3"),
    "no PEFT prefix": lambda n: n.removeprefix("base_model.model."),
    "bare model": lambda n: n.replace("base_model.model.model.", "base_model.model."),
    "nothing but layers": lambda n: n.replace("base_model.model.model.", ""),
    "torch.compile": lambda n: n.replace("model.layers", "_orig_mod.model.layers"),
    "DDP": lambda n: "module." + n,
    "FSDP": lambda n: n.replace("layers.0", "layers.0._fsdp_wrapped_module"),
    "multimodal": lambda n: n.replace("model.layers", "model.language_model.layers"),
    "multimodal, old": lambda n: n.replace("model.layers", "language_model.model.layers"),
}


@pytest.mark.parametrize("naming", NAMINGS)
def test_names_of_trainers_mean_the_same(naming: str, plain: Any) -> None:
    base, trained = plain
    digest = check(base, trained.folder).digest
    expected = load_adapter_weights(trained.folder, base.layout, base, digest)
    trained.rewrite({NAMINGS[naming](name): t for name, t in trained.tensors().items()})
    assert check(base, trained.folder).digest == digest
    weights = load_adapter_weights(trained.folder, base.layout, base, digest)
    for ours, theirs in zip(weights.terms, expected.terms, strict=True):
        assert (ours.group, ours.layer, ours.offset) == (theirs.group, theirs.layer, theirs.offset)
        assert torch.equal(ours.a, theirs.a) and torch.equal(ours.b, theirs.b)


def test_regex_of_a_multimodal_trainer(plain: Any) -> None:
    """Unsloth writes a pattern over the names of the model that it trained."""
    base, trained = plain
    set_config(
        trained.folder,
        target_modules=r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj|down_proj).*?)",
    )
    with pytest.raises(InvalidAdapterError, match="match no linear module"):
        check(base, trained.folder)
    rename = NAMINGS["multimodal"]
    trained.rewrite({rename(name): t for name, t in trained.tensors().items()})
    assert check(base, trained.folder).target_modules == (
        "mlp.down_proj",
        "self_attn.q_proj",
        "self_attn.v_proj",
    )


def test_magnitudes_in_old_and_new_spelling(base: Any, train: Callable[..., Any]) -> None:
    pristine = type(base)(copy.deepcopy(base.model), base.layout)
    trained = train(base, r=4, use_dora=True, target_modules=TARGETS)
    digest = check(pristine, trained.folder).digest
    for ending in (".weight", ".default", ".default.weight"):
        renamed = {
            n + ending if n.endswith("lora_magnitude_vector") else n: t
            for n, t in trained.tensors().items()
        }
        save_file(renamed, trained.folder / "adapter_model.safetensors")
        assert check(pristine, trained.folder).digest == digest
        trained.rewrite(
            {n.removesuffix(ending) if "magn" in n else n: t for n, t in renamed.items()}
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_its_own_content(dtype: torch.dtype, plain: Any) -> None:
    base, trained = plain
    full = check(base, trained.folder)
    trained.rewrite({n: t.to(dtype) for n, t in trained.tensors().items()})
    half = check(base, trained.folder)
    assert half.digest != full.digest
    assert half.dtypes == ({torch.float16: "F16", torch.bfloat16: "BF16"}[dtype],)
    weights = load_adapter_weights(trained.folder, base.layout, base, half.digest)
    assert all(t.a.dtype == t.b.dtype == torch.float32 for t in weights.terms)


def shard(trained: Any, count: int = 3) -> dict[str, str]:
    """Split the file as `save_pretrained` shards a model; the weight map."""
    tensors = sorted(trained.tensors().items())
    (trained.folder / "adapter_model.safetensors").unlink()
    weight_map = {}
    for index in range(count):
        name = f"adapter_model-{index + 1:05d}-of-{count:05d}.safetensors"
        part = dict(tensors[index::count])
        save_file(part, trained.folder / name)
        weight_map.update(dict.fromkeys(part, name))
    write_index(trained, weight_map)
    return weight_map


def write_index(trained: Any, weight_map: Any) -> None:
    path = trained.folder / "adapter_model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def test_shards_are_one_content(plain: Any) -> None:
    base, trained = plain
    digest = check(base, trained.folder).digest
    shard(trained)
    assert check(base, trained.folder).digest == digest
    assert load_adapter_weights(trained.folder, base.layout, base, digest).digest == digest


def test_an_index_that_does_not_agree(plain: Any) -> None:
    base, trained = plain
    whole = (trained.folder / "adapter_model.safetensors").read_bytes()
    weight_map = shard(trained)
    key, file = next(iter(weight_map.items()))

    def refused(param: str) -> None:
        with pytest.raises(InvalidAdapterError) as caught:
            check(base, trained.folder)
        assert caught.value.param == param

    write_index(trained, {k: v for k, v in weight_map.items() if k != key})
    refused("adapter_model.safetensors.index.json")
    write_index(trained, {**weight_map, "extra.lora_A.weight": file})
    refused("adapter_model.safetensors.index.json")
    write_index(trained, {**weight_map, key: "../../etc/passwd"})
    refused("../../etc/passwd")
    write_index(trained, [1])
    refused("adapter_model.safetensors.index.json")
    write_index(trained, weight_map)
    (trained.folder / "adapter_model.safetensors").write_bytes(whole)
    refused("adapter_model.safetensors")
    (trained.folder / "adapter_model.safetensors").unlink()
    (trained.folder / file).unlink()
    refused(file)
    (trained.folder / "adapter_model.safetensors.index.json").unlink()
    refused("adapter_model.safetensors.index.json")


PREFIX = "base_model.model.model.layers."
Q = PREFIX + "1.self_attn.q_proj"
Tensors = dict[str, torch.Tensor]


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: t for n, t in tensors.items() if n != name}


def plus(name: str, *shape: int, dtype: torch.dtype | None = None) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.zeros(shape, dtype=dtype)}


def changed(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def with_nan(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    t[0, 0] = float("nan")
    return t


A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
BROKEN: dict[str, tuple[Callable[[Tensors], Tensors], str | None]] = {
    # What is done to the tensors, and the one named; None for the tensor that was added.
    "a missing tensor": (without(B), "model.layers.1.self_attn.q_proj.lora_B.weight"),
    "a module of no target": (plus(f"{PREFIX}0.mlp.up_proj.lora_A.weight", 4, 32), None),
    "a layer beyond the base": (plus(f"{PREFIX}7.self_attn.q_proj.lora_A.weight", 4, 32), None),
    "a vision tower": (plus("base_model.model.vision.layers.0.q_proj.lora_A.weight", 4, 32), None),
    "an embedding": (plus("base_model.model.model.embed_tokens.lora_embedding_A", 4, 61), None),
    "a saved module": (plus("base_model.model.score.modules_to_save.weight", 2, 2), None),
    "trained embeddings": (plus("base_model.model.model.embed_tokens.weight", 61, 32), None),
    "a bias that the config does not train": (plus(f"{Q}.lora_B.bias", 32), None),
    "magnitudes that the config does not train": (plus(f"{Q}.lora_magnitude_vector", 32), None),
    "a base weight": (plus(f"{Q}.base_layer.weight", 32, 32), None),
    "a wrong width": (changed(A, lambda t: t[:, :-1]), A),
    "a wrong rank": (changed(A, lambda t: t[:-1]), A),
    "a wrong height": (changed(B, lambda t: t[:-1]), B),
    "transposed": (changed(B, torch.t), B),
    "not a number": (changed(A, with_nan), A),
    "infinite": (changed(B, lambda t: t / 0.0), B),
    "integers": (changed(A, lambda t: t.to(torch.int8)), A),
    "double precision": (changed(A, torch.Tensor.double), A),
    "one tensor twice": (plus(f"{Q}.lora_A.default.weight", 4, 32), A),
    "garbage": (plus("optimizer.state", 3), None),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_fit_is_refused_naming_it(case: str, plain: Any) -> None:
    base, trained = plain
    change, named = BROKEN[case]
    trained.rewrite(change(trained.tensors()))
    with pytest.raises(InvalidAdapterError) as caught:
        check(base, trained.folder)
    expected = named or next(iter(change({})))
    assert expected in (caught.value.param, infix(caught.value.param))


def test_two_adapters_or_two_namings_in_one_file(plain: Any) -> None:
    base, trained = plain
    tensors = trained.tensors()
    two = {infix(n).replace("default", "ab"[i % 2]): t for i, (n, t) in enumerate(tensors.items())}
    trained.rewrite(two)
    with pytest.raises(InvalidAdapterError, match="several adapters"):
        check(base, trained.folder)
    mixed = {n.replace("model.layers.0", "layers.0"): t for n, t in tensors.items()}
    trained.rewrite(mixed)
    with pytest.raises(InvalidAdapterError, match="others under"):
        check(base, trained.folder)


def test_up_to_five_left_over_tensors_are_named(plain: Any) -> None:
    base, trained = plain
    extra = {f"{PREFIX}0.mlp.up_proj{i}.lora_A.weight": torch.zeros(4, 32) for i in range(7)}
    trained.rewrite({**trained.tensors(), **extra})
    with pytest.raises(InvalidAdapterError, match="and 2 more") as caught:
        check(base, trained.folder)
    assert sum(name in caught.value.message for name in extra) == 5


@pytest.mark.parametrize(
    "content",
    [b"", b"\x00" * 8, b"\xff" * 64, (1 << 60).to_bytes(8, "little") + b"{}", b"PK\x03\x04"],
)
def test_a_file_that_is_no_safetensors(content: bytes, plain: Any) -> None:
    base, trained = plain
    (trained.folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(InvalidAdapterError) as caught:
        check(base, trained.folder)
    assert caught.value.param == "adapter_model.safetensors"


def test_the_rank_limit(plain: Any) -> None:
    base, trained = plain
    with pytest.raises(InvalidAdapterError, match="the limit is 3") as caught:
        validate(trained.folder, base.layout, base, ValidationLimits(max_rank=3))
    assert caught.value.param == "r"


def test_another_base_of_other_sizes(plain: Any, make_base: Callable[..., Any]) -> None:
    _, trained = plain
    for options in ({"hidden_size": 64}, {"num_hidden_layers": 2}, {"num_hidden_layers": 4}):
        other = make_base("llama", **options)
        with pytest.raises(InvalidAdapterError):
            check(other, trained.folder)


@pytest.mark.parametrize(
    ("named", "accepted"),
    [
        (None, True),
        ("", True),
        ("tiny", True),
        ("some-org/Tiny", True),
        ("/root/models/tiny/", True),
        ("C:\\models\\TINY", True),
        ("/root/.cache/huggingface/hub/models--some-org--tiny/snapshots/0a1b2c", True),
        ("unsloth/tiny-unsloth-bnb-4bit", True),
        ("unsloth/tiny-bnb-4bit", True),
        ("some-org/tiny-instruct", False),
        ("/root/models/large", False),
        ("models--some-org--large", False),
    ],
)
def test_the_bases_name(named: str | None, accepted: bool, plain: Any) -> None:
    base, trained = plain
    set_config(trained.folder, base_model_name_or_path=named)
    if accepted:
        assert check(base, trained.folder).base_name == (named or None)
    else:
        with pytest.raises(InvalidAdapterError) as caught:
            check(base, trained.folder)
        assert caught.value.param == "base_model_name_or_path"


def test_another_name_of_the_base(plain: Any) -> None:
    base, trained = plain
    set_config(trained.folder, base_model_name_or_path="Some-Org/Known-As")
    known = replace(base, layout=replace(base.layout, other_names=("some-org/known-as",)))
    assert check(known, trained.folder).base_name == "Some-Org/Known-As"


def test_copies_of_the_head(make_base: Callable[..., Any], train: Callable[..., Any]) -> None:
    """PEFT saves the head beside a LoRA on it, and would load it: it must be the base's."""
    base = make_base("llama", tie_word_embeddings=True)
    pristine = type(base)(copy.deepcopy(base.model), base.layout)
    trained = train(base, r=2, target_modules=["lm_head"])
    tensors = trained.tensors()
    copied = "base_model.model.lm_head.base_layer.weight"
    assert copied in tensors
    digest = check(pristine, trained.folder).digest

    without_copy = {n: t for n, t in tensors.items() if n != copied}
    trained.rewrite(without_copy)
    assert check(pristine, trained.folder).digest == digest
    embedding = "base_model.model.model.embed_tokens.weight"
    trained.rewrite({**without_copy, embedding: tensors[copied].bfloat16()})
    assert check(pristine, trained.folder).digest == digest

    for wrong in (tensors[copied] * 1.001, torch.zeros(63, 32)):
        trained.rewrite({**without_copy, copied: wrong})
        with pytest.raises(InvalidAdapterError) as caught:
            check(pristine, trained.folder)
        assert caught.value.param == copied
