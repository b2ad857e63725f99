"""What a draft head must be to be taken, and what its digest says."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from polyloom.adapters.base_layout import BaseLayout, ModuleGroup
from polyloom.adapters.draft_heads.checkpoint import (
    DraftHead,
    draft_vocabulary,
    read_draft_head,
    save_draft_head,
)
from polyloom.adapters.draft_heads.config import DraftHeadConfig, TrainingRecord
from polyloom.adapters.draft_heads.validation import (
    delta_weights,
    load_verified,
    validate_draft_head,
)
from polyloom.adapters.errors import CorruptAdapterError, InvalidAdapterError
from tests.adapters.draft_heads.conftest import ADAPTER_DIGEST, SHARED_IDS, random_tensors

OWN_IDS = [*SHARED_IDS, 1, 39]


def refused(read: Callable[[], object]) -> InvalidAdapterError:
    with pytest.raises(InvalidAdapterError) as raised:
        read()
    return raised.value


def test_a_head_reads_back_as_it_was_saved(shared: DraftHead, tmp_path: Path) -> None:
    again = read_draft_head(tmp_path / "shared")
    assert again.digest == shared.digest
    assert draft_vocabulary(again.tensors).tolist() == SHARED_IDS
    assert again.tensors["t2d"].nonzero().flatten().tolist() == SHARED_IDS


def test_the_digest_is_of_what_means_something(shared: DraftHead, tmp_path: Path) -> None:
    record = TrainingRecord(prompts=1, tokens=2, epochs=3, seconds=4.0)
    told = msgspec.structs.replace(shared.config, training=record)
    assert save_draft_head(tmp_path / "told", told, shared.tensors).digest == shared.digest
    eps = msgspec.structs.replace(shared.config, rms_norm_eps=1e-6)
    assert save_draft_head(tmp_path / "eps", eps, shared.tensors).digest != shared.digest
    moved = shared.tensors | {"norm.weight": shared.tensors["norm.weight"] + 1}
    assert save_draft_head(tmp_path / "moved", shared.config, moved).digest != shared.digest


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"hidden_size": "8"}, "hidden_size"),
        ({"draft_vocab_size": 41}, "draft_vocab_size"),
        ({"rank": 4}, "shared_head_digest"),
        ({"adapter_digest": "sha256:12"}, "adapter_digest"),
        ({"unheard_of": 1}, "config.json"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    ],
)
def test_a_wrong_field_is_named(
    shared: DraftHead, tmp_path: Path, change: dict[str, object], param: str
) -> None:
    file = tmp_path / "shared" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert refused(lambda: read_draft_head(tmp_path / "shared")).param == param


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("fc.weight", torch.zeros(8, 15)),
        ("norm.weight", torch.full((8,), torch.nan)),
        ("down_proj.weight", torch.zeros(8, 12, dtype=torch.int32)),
        ("surprise.weight", torch.zeros(1)),
        ("d2t", torch.full((7,), 40)),
        ("d2t", -torch.arange(7)),
        ("t2d", torch.ones(40, dtype=torch.bool)),
        ("mlp_norm.weight", None),
    ],
)
def test_a_wrong_tensor_is_named(
    shared: DraftHead, tmp_path: Path, name: str, tensor: torch.Tensor | None
) -> None:
    file = tmp_path / "shared" / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(name, None)
    save_file(tensors if tensor is None else tensors | {name: tensor}, file)
    assert refused(lambda: read_draft_head(tmp_path / "shared")).param == name


def test_files_that_are_no_head(tmp_path: Path, shared: DraftHead) -> None:
    assert refused(lambda: read_draft_head(tmp_path)).param == "config.json"
    folder = tmp_path / "shared"
    (folder / "model.safetensors").write_bytes(b"no tensors")
    assert refused(lambda: read_draft_head(folder)).param == "model.safetensors"
    (folder / "config.json").write_text("{")
    assert refused(lambda: read_draft_head(folder)).param == "config.json"


def test_a_head_is_checked_against_base_and_revision(
    shared: DraftHead,
    layout: BaseLayout,
    tmp_path: Path,
    delta_config: Callable[..., DraftHeadConfig],
) -> None:
    known = {shared.digest: shared}.get

    def validated(config: DraftHeadConfig, adapter: str | None, ids: list[int]) -> DraftHead:
        folder = tmp_path / "delta"
        save_draft_head(folder, config, random_tensors(config, ids, 1))
        return validate_draft_head(folder, layout, adapter, known, max_rank=16)

    good = validated(delta_config(), ADAPTER_DIGEST, OWN_IDS)
    assert good.config.rank == 3
    other = "sha256:" + "c" * 64
    wrong: list[tuple[DraftHeadConfig, str | None, list[int], str]] = [
        (delta_config(), other, OWN_IDS, "adapter_digest"),
        (delta_config(), None, OWN_IDS, "adapter_digest"),
        (delta_config(shared_head_digest=other), ADAPTER_DIGEST, OWN_IDS, "shared_head_digest"),
        (delta_config(rank=17), ADAPTER_DIGEST, OWN_IDS, "rank"),
        (delta_config(), ADAPTER_DIGEST, OWN_IDS[::-1], "d2t"),
        (delta_config(intermediate_size=16), ADAPTER_DIGEST, OWN_IDS, "intermediate_size"),
        (
            delta_config(draft_vocab_size=12),
            ADAPTER_DIGEST,
            [*OWN_IDS, 4, 6, 7],
            "draft_vocab_size",
        ),
    ]
    for config, adapter, ids, param in wrong:
        assert refused(lambda c=config, a=adapter, i=ids: validated(c, a, i)).param == param
    elsewhere = replace(layout, digest=other)
    folder = tmp_path / "shared"
    error = refused(lambda: validate_draft_head(folder, elsewhere, None, known, max_rank=16))
    assert error.param == "verifier.digest"


def test_stored_files_are_what_their_digest_says(shared: DraftHead, tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    assert load_verified(folder, shared.digest).digest == shared.digest
    with pytest.raises(CorruptAdapterError):
        load_verified(folder, "sha256:" + "0" * 64)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CorruptAdapterError):
        load_verified(folder, shared.digest)


def test_a_delta_is_rank_terms_with_room_for_own_tokens(
    shared: DraftHead, tmp_path: Path, delta_config: Callable[..., DraftHeadConfig]
) -> None:
    config = delta_config()
    head = save_draft_head(tmp_path / "delta", config, random_tensors(config, OWN_IDS, 1))
    weights = delta_weights(head, shared)
    by_group = {term.group: term for term in weights.terms}
    assert weights.digest == head.digest
    assert by_group[ModuleGroup.FUSE].a.shape == (3, 16)
    output = by_group[ModuleGroup.HEAD].b
    assert output.shape == (len(SHARED_IDS) + config.adapter_vocab_size, 3)
    assert not output[len(OWN_IDS) :].any()
    with pytest.raises(CorruptAdapterError):
        delta_weights(head, DraftHead(shared.config, shared.tensors, "sha256:" + "0" * 64))
