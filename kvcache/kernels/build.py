"""Builds and loads C++ CPU ops, once per source, machine and torch version.

Sources register their ops with `TORCH_LIBRARY` from `torch/library.h` alone, so no Python headers
are needed; a C++20 compiler and ninja are. Headers beside a source, and those of this package, may
be included.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

COMPILE_FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    # Of -ffast-math only this: its assumption that nothing is infinite breaks masked scores, and
    # its reordering of sums breaks rounding tricks. Reductions say `omp simd` where they need it.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-fno-gnu-unique",
    "-Wall",
    "-Wno-psabi",
)
_HEADERS = Path(__file__).parent
_BUILT = "built"


def load_cpu_ops(name: str, sources: Sequence[Path], cache_dir: Path | None = None) -> str | None:
    """Make the ops of `sources` available under `torch.ops`, building them if they are not cached.

    name: identifier of the library; two libraries of one process need different ones.
    cache_dir: where builds are kept; default `~/.cache/polyloom/ops`. Processes may share it.

    Returns None when the ops are loaded, else the reason in one line: no compiler, or what it said.
    """
    root = cache_dir or Path.home() / ".cache" / "polyloom" / "ops"
    library = f"{name}_{_digest(sources)}"
    folder = root / library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            if not (folder / _BUILT).exists():
                reason = _build(library, sources, folder)
                if reason is not None:
                    return reason
                (folder / _BUILT).touch()
        torch.ops.load_library(folder / f"{library}.so")  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"cannot load {library}: {_first_line(str(error))}"
    return None


def _build(library: str, sources: Sequence[Path], folder: Path) -> str | None:
    """Compile and link `sources` to `folder/library.so`; the reason if that fails."""
    try:
        from torch.utils import cpp_extension
    except ImportError as error:
        return f"torch's extension loader is unavailable: {error}"
    compiler = str(cpp_extension.get_cxx_compiler())  # type: ignore[no-untyped-call]
    if shutil.which(compiler) is None:
        return f"no C++ compiler found ({compiler})"
    # The flock is ours; torch's own lock is a file that a killed build leaves behind for good.
    (folder / "lock").unlink(missing_ok=True)
    try:
        with _environment_on_path():
            cpp_extension.load(
                library,
                [str(source) for source in sources],
                extra_cflags=list(COMPILE_FLAGS),
                # No -fopenmp for the linker: the symbols resolve to the OpenMP runtime that torch
                # has loaded, so both share one thread pool whatever file torch ships it in.
                extra_include_paths=[str(_HEADERS)],
                build_directory=str(folder),
                is_python_module=False,
            )
    except RuntimeError as error:
        return f"build of {library} failed: {_first_line(str(error))}"
    return None


def _digest(sources: Sequence[Path]) -> str:
    """Short digest of everything that the binary depends on."""
    digest = hashlib.sha256()
    headers = {h for folder in {_HEADERS, *(s.parent for s in sources)} for h in folder.glob("*.h")}
    for path in [*sources, *sorted(headers)]:
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode())
        digest.update(content)
    for part in (*COMPILE_FLAGS, torch.__version__, _processor()):
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """What `-march=native` depends on: model and feature flags of the first processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    except OSError:
        return os.uname().machine
    fields = ("model name", "model\t", "stepping", "flags", "CPU part", "Features")
    return "\n".join(line for line in lines if line.startswith(fields))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Exclusive among processes; released by the kernel if this one dies."""
    with (folder / "flock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _environment_on_path() -> Iterator[None]:
    """Torch starts `ninja` through PATH; an environment that is not activated is not on it."""
    before = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _first_line(message: str) -> str:
    """The line of a compiler's or loader's output that says what is wrong."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    errors = (line for line in lines if "error:" in line)
    return next(errors, lines[0] if lines else "no message")
