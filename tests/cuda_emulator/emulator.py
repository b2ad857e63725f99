"""Runs the text of CUDA kernels on the CPU: a stand-in for `cupy.RawModule` (see `cuda_cpu.h`).

Faults are exceptions that name block, thread and source line: barriers that not every thread
reaches, deadlocks, shuffles from lanes that take no part, memory faults on shared memory and on
`guarded` tensors, misaligned vectors, arguments that do not fit the kernel's parameters. Shared
memory starts as NaN. What a launch reads and writes of global memory is counted in bytes.
"""

import ctypes
import hashlib
import mmap
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
CACHE = Path.home() / ".cache" / "polyloom" / "cuda-emulator"
UNDEFINED_BEHAVIOUR = (
    "-fsanitize=alignment,bounds,null,integer-divide-by-zero",
    "-fsanitize-undefined-trap-on-error",
)
FLAGS = (
    "-std=gnu++17",
    "-O1",
    "-g1",
    "-shared",
    "-fPIC",
    "-fno-strict-aliasing",
    "-fno-omit-frame-pointer",
    "-fno-gnu-unique",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-Wno-unused",
)
_PAGE = mmap.PAGESIZE
_EXPORT = 'extern "C" __attribute__((visibility("default")))'
_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:__align__\([^)]*\)\s*)?([\w:<> ]+?)\s+(\w+)\s*\[\s*\]\s*;"
)
_STATIC = re.compile(
    r"(?<!extern )__shared__\s+(?:__align__\([^)]*\)\s*)?([\w:<>, ]+?)\s+(\w+)((?:\s*\[[^\]]*\])*)\s*;"
)
_TOOLKIT = re.compile(r"^\s*#\s*include\s*<cuda\w*\.h>", re.MULTILINE)


class KernelError(RuntimeError):
    """A kernel did what a device would crash on, hang on or answer with garbage."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of global memory that kernels moved through `__ldg` and its kin."""

    loaded: int
    stored: int


class Kernel:
    """One instantiation; called as CuPy's kernels are."""

    def __init__(self, module: "RawModule", name: str, function: Any) -> None:
        self._module = module
        self._name = name
        self._function = function
        self.max_dynamic_shared_size_bytes = 48 << 10  # to be raised by who needs more, as in CuPy

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[object],
        *,
        shared_mem: int = 0,
    ) -> None:
        shape = [*grid, *[1] * (3 - len(grid)), *block, *[1] * (3 - len(block))]
        limit = max(48 << 10, self.max_dynamic_shared_size_bytes)
        config = (ctypes.c_uint32 * 9)(*shape, shared_mem, self._module.seed, limit)
        values = [_packed(value) for value in args]
        pointers = (ctypes.c_void_p * len(values))(*[value.ctypes.data for value in values])
        sizes = (ctypes.c_uint32 * len(values))(*[value.nbytes for value in values])
        if self._function(config, pointers, sizes, len(values)):
            raise KernelError(f"{self._name}: {self._module.last_error()}")


class RawModule:
    """`cupy.RawModule`, as far as the project uses it; built once for a text and kept on disk.

    checks: compiler flags of sanitizers.  seed: of the order in which threads run.
    """

    def __init__(
        self,
        *,
        code: str,
        options: Sequence[str] = (),
        name_expressions: Sequence[str] = (),
        checks: Sequence[str] = UNDEFINED_BEHAVIOUR,
        seed: int = 1,
    ) -> None:
        self.seed = seed
        self._names = list(name_expressions)
        kept = [option for option in options if option.startswith("-D")]
        self._path = _build(_translation_unit(code, self._names), [*FLAGS, *checks, *kept])
        # PyDLL keeps the interpreter's lock: the emulator's state is one a module.
        self._library = ctypes.PyDLL(str(self._path))
        self._library.cuda_cpu_error.restype = ctypes.c_char_p
        self._library.cuda_cpu_traffic.restype = ctypes.c_ulonglong

    def get_function(self, name: str) -> Kernel:
        return Kernel(self, name, getattr(self._library, f"cuda_cpu_k{self._names.index(name)}"))

    def traffic(self) -> Traffic:
        """Of all launches since the last call."""
        return Traffic(self._library.cuda_cpu_traffic(0), self._library.cuda_cpu_traffic(1))

    def last_error(self) -> str:
        message = str(self._library.cuda_cpu_error().decode())
        place = re.search(r"pc=0x([0-9a-f]+)", message)
        if place is None:
            return message
        command = ["addr2line", "-s", "-i", "-e", str(self._path), place[1]]
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        lines = [line for line in found.split() if ".cu" in line]
        return f"{message} at {' < '.join(lines)}" if lines else message


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that ends, but for alignment to 16 bytes, at a page that nothing may touch."""
    tensor = tensor.contiguous()
    size = tensor.numel() * tensor.element_size()
    needed = -(-size // 16) * 16
    body = -(-max(needed, 1) // _PAGE) * _PAGE
    memory = mmap.mmap(-1, body + 2 * _PAGE)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (base, base + _PAGE + body):
        if _LIBC.mprotect(page, _PAGE, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = _PAGE + body - needed
    raw = torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=max(size, 1))
    copy = raw[:size].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def _translation_unit(code: str, names: Sequence[str]) -> str:
    launchers = "\n".join(
        f"{_EXPORT} int cuda_cpu_k{index}"
        "(const uint32_t* config, void** args, const uint32_t* sizes, unsigned count)"
        f"{{ return cuda_cpu::launch(&{name}, config, args, sizes, count); }}"
        for index, name in enumerate(names)
    )
    reports = (
        f"{_EXPORT} const char* cuda_cpu_error() {{ return cuda_cpu::msg; }}\n"
        f"{_EXPORT} unsigned long long cuda_cpu_traffic(int which) {{\n"
        "  auto& bytes = which ? cuda_cpu::stored : cuda_cpu::loaded;\n"
        "  auto result = bytes; bytes = 0; return result;\n}\n"
    )
    return (
        f'#include "cuda_cpu.h"\n#line 1 "kernel.cu"\n{_translate(code)}\n'
        f'#line 1 "launchers"\n{launchers}\n{reports}'
    )


def _translate(code: str) -> str:
    """What no macro can do: place shared memory, and drop the toolkit's includes."""
    code = _DYNAMIC.sub(r"\1* \2 = reinterpret_cast<\1*>(::cuda_cpu::dyn_shared());", code)
    code = _STATIC.sub(
        r"static auto& \2 = ::cuda_cpu::shared_alloc<\1\3>(); "
        r"::cuda_cpu::shared_decl(&\2, sizeof \2);",
        code,
    )
    return _TOOLKIT.sub("//", code)


def _build(source: str, flags: Sequence[str]) -> Path:
    header = (HERE / "cuda_cpu.h").read_text()
    digest = hashlib.sha256("\0".join([source, header, *flags]).encode()).hexdigest()[:20]
    library = CACHE / f"{digest}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unit, unfinished = (CACHE / f"{digest}.{os.getpid()}.{end}" for end in ("cpp", "tmp"))
        unit.write_text(source)
        command = ["g++", *flags, f"-I{HERE}", str(unit), "-o", str(unfinished), "-ldl"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        unit.unlink()
        if result.returncode:
            raise RuntimeError(result.stderr)
        os.replace(unfinished, library)
    return library


def _packed(value: object) -> np.ndarray[Any, Any]:
    """As CuPy packs arguments: a Python int is 8 bytes, a numpy scalar its own size."""
    if isinstance(value, np.generic):
        return np.array([value])
    if isinstance(value, int):
        return np.array([value], np.uint64 if value >= 1 << 63 else np.int64)
    raise TypeError(f"{type(value)} is no kernel argument")


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
