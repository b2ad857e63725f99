import multiprocessing
from pathlib import Path

import pytest
import torch

from polyloom.kvcache.kernels import build
from polyloom.kvcache.kernels.build import load_cpu_ops

SOURCE = """
#include <torch/library.h>
#include "factor.h"
static int64_t threads_times(int64_t x) {{ return x * FACTOR; }}
TORCH_LIBRARY({namespace}, m) {{ m.def("times(int x) -> int", &threads_times); }}
"""


def write(folder: Path, namespace: str, factor: int) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "factor.h").write_text(f"#define FACTOR {factor}\n")
    source = folder / "times.cpp"
    source.write_text(SOURCE.format(namespace=namespace))
    return source


def test_builds_once_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "src", "polyloom_test_build", 7)
    assert load_cpu_ops("polyloom_test_build", [source], tmp_path / "cache") is None
    assert torch.ops.polyloom_test_build.times(6) == 42

    def rebuilt(*_: object) -> str:
        raise AssertionError("built although it was cached")

    monkeypatch.setattr(build, "_build", rebuilt)
    assert load_cpu_ops("polyloom_test_build", [source], tmp_path / "cache") is None


def test_digest_sees_sources_headers_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "src", "ns", 1)
    first = build._digest([source])
    write(tmp_path / "src", "ns", 2)
    header_changed = build._digest([source])
    source.write_text(source.read_text() + "// changed\n")
    source_changed = build._digest([source])
    monkeypatch.setattr(build, "COMPILE_FLAGS", ("-O0",))
    assert len({first, header_changed, source_changed, build._digest([source])}) == 4


def test_a_compile_error_is_the_reason(tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int f() { return undeclared_name; }\n")
    reason = load_cpu_ops("polyloom_broken", [source], tmp_path / "cache")
    assert reason is not None and "\n" not in reason
    assert "undeclared_name" in reason


def test_no_compiler_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.cpp_extension.get_cxx_compiler", lambda: "no-such-compiler")
    source = write(tmp_path / "src", "ns", 1)
    reason = load_cpu_ops("polyloom_none", [source], tmp_path / "cache")
    assert reason == "no C++ compiler found (no-such-compiler)"


def test_a_killed_build_does_not_block_the_next(tmp_path: Path) -> None:
    source = write(tmp_path / "src", "polyloom_test_killed", 3)
    folder = tmp_path / "cache" / f"polyloom_test_killed_{build._digest([source])}"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    (folder / f"{folder.name}.so").write_bytes(b"half a library")
    assert load_cpu_ops("polyloom_test_killed", [source], tmp_path / "cache") is None
    assert torch.ops.polyloom_test_killed.times(2) == 6


def _load(source: Path, cache: Path) -> None:
    reason = load_cpu_ops("polyloom_test_two", [source], cache)
    if reason is not None:
        raise SystemExit(reason)


def test_two_processes_share_one_build(tmp_path: Path) -> None:
    source = write(tmp_path / "src", "polyloom_test_two", 5)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_load, args=(source, tmp_path / "cache")) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert len(list((tmp_path / "cache").iterdir())) == 1
