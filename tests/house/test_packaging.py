"""The layout's promises: what is installed is what is in the tree, and nothing shadows Python."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = ("platform", "routing", "adapters", "kvcache", "migrations")


def declared_packages() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return set(project["tool"]["setuptools"]["packages"])


def packages_in_tree() -> set[str]:
    folders = {path.parent for top in TOP_LEVEL for path in (ROOT / top).rglob("*.py")}
    return {".".join(("polyloom", *folder.relative_to(ROOT).parts)) for folder in folders}


def test_every_folder_with_code_is_declared() -> None:
    assert declared_packages() == packages_in_tree()


def test_every_package_but_platform_has_an_init() -> None:
    for name in declared_packages() - {"polyloom.platform"}:
        assert (ROOT.joinpath(*name.split(".")[1:]) / "__init__.py").is_file(), name
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_the_standard_platform_module_wins_in_the_root() -> None:
    command = [sys.executable, "-c", "import platform; print(platform.machine())"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip()


@pytest.mark.slow
def test_the_wheel_carries_every_module_and_source(tmp_path: Path) -> None:
    """A fresh build folder: a reused one brings deleted modules back."""
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    for name in tracked:
        file = ROOT / name
        if file.is_file() and not name.startswith("typings/"):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), "."]
    subprocess.run(build, cwd=source, check=True)
    (wheel,) = tmp_path.glob("polyloom-*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    for top in TOP_LEVEL:
        for file in (source / top).rglob("*"):
            if file.suffix in {".py", ".cpp", ".h", ".cu", ".cuh", ".html", ".mako"}:
                assert f"polyloom/{file.relative_to(source)}" in shipped
    modules = [
        name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        for name in shipped
        if name.endswith(".py") and not name.startswith("polyloom/migrations/")
    ]
    unpacked = tmp_path / "unpacked"
    zipfile.ZipFile(wheel).extractall(unpacked)
    program = (
        f"import importlib, polyloom; [importlib.import_module(m) for m in {sorted(modules)!r}]"
    )
    program = f"import sys; sys.path.insert(0, {str(unpacked)!r})\n" + program
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
