"""Every CUDA kernel compiles for every architecture that is served, within its registers."""

from pathlib import Path

import pytest
import torch

from polyloom.kvcache.kernels.cuda import read_source
from tests.cuda_emulator import sanitized
from tests.cuda_emulator.nvrtc import ARCHITECTURES, CompileError, compile_for
from tests.cuda_emulator.sources import SOURCES

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (torch.float32, torch.bfloat16)  # float16 compiles as bfloat16 does; see verify_kernels
SHARED_BYTES = 48 << 10  # what a kernel may have without asking for more


def test_every_source_is_known() -> None:
    folders = ("adapters", "kvcache", "platform", "routing")
    found = {path for folder in folders for path in (ROOT / folder).rglob("*.cu")}
    assert {source.resolve() for source, _ in SOURCES} == found


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source[0].name)
def test_kernels_compile_without_spills(source, architecture: str) -> None:
    path, names = source
    wanted = [name for dtype in DTYPES for name in names(dtype)]
    for kernel in compile_for(read_source(path), wanted, architecture):
        assert kernel.spilled_bytes == 0, kernel
        assert kernel.registers <= 168, kernel
        assert kernel.shared_bytes <= SHARED_BYTES, kernel


def test_the_compiler_sees_what_a_host_compiler_does_not() -> None:
    """Under NVRTC there is no INFINITY: a reason to compile with it beside g++."""
    with pytest.raises(CompileError, match="INFINITY"):
        compile_for("__global__ void k(float* y) { y[0] = INFINITY; }", ["k"], "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("planted", [None, "expand: outputs are not cut"])
def test_the_address_sanitiser_finds_only_what_is_planted(planted: str | None) -> None:
    done = sanitized.run(planted)
    assert (done.returncode == 0) == (planted is None), done.stderr
    assert ("AddressSanitizer: heap-buffer-overflow" in done.stderr) == (planted is not None)
