"""Compiles kernels for given architectures with NVRTC, which needs no GPU, and reads what they use."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cuda.pathfinder import find_nvidia_header_directory
from cupy.cuda import nvrtc

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
_USED = re.compile(
    r"Compiling entry function '(?P<symbol>\w+)'"
    r".*?(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True)
class Compiled:
    """One kernel on one architecture. shared_bytes: static.  spilled_bytes: stored and loaded."""

    name: str
    architecture: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


class CompileError(RuntimeError):
    """What NVRTC said."""


def compile_for(code: str, names: Sequence[str], architecture: str) -> list[Compiled]:
    """Compile `names` of `code` to machine code with the options that CuPy uses."""
    program = nvrtc.createProgram(code, "kernel.cu", (), ())
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        options = (
            f"--gpu-architecture={architecture}",
            "--std=c++17",
            "--ptxas-options=-v",
            "-ftz=true",
            "--device-as-default-execution-space",
            f"-I{find_nvidia_header_directory('cudart')}",
        )
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError:
            raise CompileError(nvrtc.getProgramLog(program)) from None
        symbols = {nvrtc.getLoweredName(program, name): name for name in names}
        used = {m["symbol"]: m for m in _USED.finditer(nvrtc.getProgramLog(program))}
    finally:
        nvrtc.destroyProgram(program)
    return [_compiled(name, architecture, used[symbol]) for symbol, name in symbols.items()]


def _compiled(name: str, architecture: str, used: re.Match[str]) -> Compiled:
    shared = re.search(r"(\d+) bytes smem", used["rest"])
    return Compiled(
        name,
        architecture,
        int(used["registers"]),
        0 if shared is None else int(shared[1]),
        int(used["stores"]) + int(used["loads"]),
    )
