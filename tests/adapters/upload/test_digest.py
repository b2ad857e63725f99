"""One meaning, one digest; another meaning, another; bytes that changed are noticed."""

import copy
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polyloom.adapters.artifact import ArtifactLimits, Staging
from polyloom.adapters.errors import CorruptAdapterError, InvalidAdapterError
from polyloom.adapters.validation import ValidationLimits, load_adapter_weights, validate

TARGETS = ["q_proj", "v_proj"]


@pytest.fixture
def plain(base: Any, train: Callable[..., Any]) -> Any:
    pristine = type(base)(copy.deepcopy(base.model), base.layout)
    return pristine, train(base, r=4, lora_alpha=6, target_modules=TARGETS)


def digest(base: Any, folder: Path) -> str:
    return validate(folder, base.layout, base, ValidationLimits()).digest


def set_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_digest_of_a_known_adapter(base: Any, tmp_path: Path) -> None:
    """Revisions are recorded under it: no release may change it for content it has accepted."""
    from safetensors.torch import save_file

    name = "base_model.model.model.layers.0.self_attn.o_proj"
    a = torch.arange(32.0).view(1, 32)
    tensors = {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": a.T.contiguous().bfloat16()}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 1,
        "target_modules": [name.removeprefix("base_model.model.")],
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert (
        digest(base, tmp_path)
        == "sha256:77348e27992595327722084a04e8075162b3fe85025fa88943a6e8bcfee1414b"
    )


async def test_packing_changes_nothing(
    plain: Any,
    tmp_path: Path,
    make_tar: Callable[..., bytes],
    make_zip: Callable[..., bytes],
    stream: Callable[[bytes], AsyncIterator[bytes]],
) -> None:
    base, trained = plain
    files = [(p.name, p.read_bytes()) for p in trained.folder.iterdir()]
    top = [(f"top/{name}", data) for name, data in reversed(files)]
    digests = {digest(base, trained.folder)}
    for body in (make_tar(files), make_tar(top, "w:gz"), make_zip(files), make_zip(top)):
        with Staging(tmp_path / "staging", ArtifactLimits()) as staging:
            await staging.receive_archive(stream(body), None)
            digests.add(digest(base, staging.folder))
    assert len(digests) == 1


def test_spelling_of_the_config_changes_nothing(plain: Any) -> None:
    base, trained = plain
    expected = digest(base, trained.folder)
    set_config(
        trained.folder,
        target_modules=list(reversed(TARGETS)),
        lora_alpha=6.0,
        base_model_name_or_path="TINY",
        peft_version="0.9.0",
        lora_dropout=0.3,
        inference_mode=False,
        rank_pattern=None,
        layers_to_transform=[],
    )
    assert digest(base, trained.folder) == expected


def test_meaning_changes_it(plain: Any) -> None:
    base, trained = plain
    seen = {digest(base, trained.folder)}

    def changed() -> None:
        new = digest(base, trained.folder)
        assert new not in seen
        seen.add(new)

    for change in ({"lora_alpha": 7}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 1}}):
        set_config(trained.folder, **change)
        changed()
    tensors = trained.tensors()
    name = next(iter(tensors))
    tensors[name][0, 0] += 1e-6
    trained.rewrite(tensors)
    changed()
    for name, text in (("chat_template.jinja", "a"), ("chat_template.jinja", "b")):
        (trained.folder / name).write_text(text)
        changed()
    (trained.folder / "special_tokens_map.json").write_text("{}")
    changed()


def test_changed_bytes_are_noticed_at_load(plain: Any) -> None:
    base, trained = plain
    accepted = digest(base, trained.folder)
    path = trained.folder / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptAdapterError) as caught:
        load_adapter_weights(trained.folder, base.layout, base, accepted)
    assert caught.value.digest == accepted
    path.write_bytes(content[:-1])
    with pytest.raises(CorruptAdapterError):
        load_adapter_weights(trained.folder, base.layout, base, accepted)
    (trained.folder / "adapter_config.json").write_text("{")
    with pytest.raises(CorruptAdapterError):
        load_adapter_weights(trained.folder, base.layout, base, accepted)
    with pytest.raises(InvalidAdapterError):
        load_adapter_weights(trained.folder, base.layout, base, None)


def test_a_config_that_changed_is_noticed_at_load(plain: Any) -> None:
    base, trained = plain
    accepted = digest(base, trained.folder)
    set_config(trained.folder, lora_alpha=60)
    with pytest.raises(CorruptAdapterError):
        load_adapter_weights(trained.folder, base.layout, base, accepted)


def test_a_row_that_dora_cannot_scale(base: Any, train: Callable[..., Any]) -> None:
    pristine = type(base)(copy.deepcopy(base.model), base.layout)
    trained = train(base, r=2, use_dora=True, target_modules=["o_proj"])
    tensors = trained.tensors()
    b = next(n for n in tensors if "layers.1" in n and "lora_B" in n)
    tensors[b][5] = 0.0
    trained.rewrite(tensors)
    pristine.model.model.layers[1].self_attn.o_proj.weight.data[5] = 0.0
    with pytest.raises(InvalidAdapterError, match="zero") as caught:
        load_adapter_weights(trained.folder, pristine.layout, pristine, None)
    assert caught.value.param == "model.layers.1.self_attn.o_proj.lora_magnitude_vector"


def test_reading_an_adapter_imports_no_web_or_database() -> None:
    code = (
        "import sys, polyloom.adapters.validation, polyloom.adapters.artifact;"
        "bad = {'litestar', 'sqlalchemy', 'redis'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
