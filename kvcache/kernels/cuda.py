"""The bridge from torch tensors to CUDA kernels that CuPy compiles (NVRTC) and launches.

A kernel source is one `.cu` file that may include the `.cuh` files of this package. CuPy keeps what
it compiled on disk, by source and options. Tensors are passed by address, without a copy; a launch
goes to torch's current stream, so it is part of a graph that is being captured there.

Another kind of device can be given a stand-in for CuPy (`stand_in`): tests run the same sources and
the same host code on the CPU.
"""

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

OPTIONS = ("--std=c++17",)
SCALAR_TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
}
_DEFAULT_SHARED_BYTES = 48 << 10
_HEADERS = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)

KernelArgument = torch.Tensor | np.generic | None


class KernelFunction(Protocol):
    """One compiled kernel, as `cupy.RawModule.get_function` gives it."""

    max_dynamic_shared_size_bytes: int

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[object],
        *,
        shared_mem: int,
    ) -> None: ...


class KernelModule(Protocol):
    """Compiled instantiations of one source."""

    def get_function(self, name: str) -> KernelFunction: ...


class Backend(Protocol):
    """What compiles and runs kernels for one type of device."""

    def module(self, code: str, names: Sequence[str]) -> KernelModule:
        """Compile `names` of `code`; the module may do so at its first use."""
        ...

    def on_stream(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """Launches inside go to torch's current stream on `device`."""
        ...


class Kernels:
    """The instantiations of one source that one engine uses on one device."""

    def __init__(self, backend: Backend, code: str, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.launches = 0
        self._backend = backend
        self._module = backend.module(code, self.names)
        self._functions: dict[str, KernelFunction] = {}

    def compile(self, device: torch.device) -> float:
        """Make every kernel ready to be launched on `device`; seconds that it took."""
        start = time.perf_counter()
        with self._backend.on_stream(device):
            for name in self.names:
                self._function(name)
        return time.perf_counter() - start

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: int,
        args: Sequence[KernelArgument],
        device: torch.device,
        shared_bytes: int = 0,
    ) -> None:
        """Run one kernel on torch's current stream. Tensors become addresses, None a null one."""
        self.launches += 1
        with self._backend.on_stream(device):
            function = self._function(name)
            if shared_bytes > max(_DEFAULT_SHARED_BYTES, function.max_dynamic_shared_size_bytes):
                function.max_dynamic_shared_size_bytes = shared_bytes
            function(grid, (block,), [_argument(value) for value in args], shared_mem=shared_bytes)

    def _function(self, name: str) -> KernelFunction:
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = self._module.get_function(name)
        return function


def read_source(path: Path) -> str:
    """A `.cu` file with the headers of this package put in place."""

    def header(match: re.Match[str]) -> str:
        text = (_HEADERS / match[1]).read_text()
        return f'#line 1 "{match[1]}"\n{text}\n#line 2 "{path.name}"'

    return _INCLUDE.sub(header, path.read_text())


def cuda_kernels(source: Path, names: tuple[str, ...], kind: str) -> Kernels:
    """The kernels `names` of `source` on devices of type `kind`, made once.

    Raises LookupError if nothing compiles for that type of device.
    """
    key = (source, names, kind)
    if key not in _made:
        _made[key] = Kernels(_backend(kind), read_source(source), names)
    return _made[key]


def unavailable(dtype: torch.dtype, kind: str) -> str | None:
    """Why there are no CUDA kernels for `dtype` on devices of type `kind`; None if there are."""
    if dtype not in SCALAR_TYPES:
        return f"no CUDA kernels for {dtype}"
    try:
        _backend(kind)
    except LookupError as error:
        return str(error)
    return None


def compiled_kernels(kind: str) -> tuple[str, ...]:
    """Every instantiation made so far for devices of type `kind`, sorted."""
    return tuple(
        sorted(name for key, kernels in _made.items() if key[2] == kind for name in kernels.names)
    )


@contextlib.contextmanager
def stand_in(kind: str, backend: Backend) -> Iterator[None]:
    """Devices of type `kind` compile and run kernels through `backend` for a while."""
    before = _stand_ins.get(kind)
    _stand_ins[kind] = backend
    _forget(kind)
    try:
        yield
    finally:
        if before is None:
            del _stand_ins[kind]
        else:
            _stand_ins[kind] = before
        _forget(kind)


def _backend(kind: str) -> Backend:
    if kind in _stand_ins:
        return _stand_ins[kind]
    if kind != "cuda":
        raise LookupError(f"no CUDA kernels on {kind} devices")
    try:
        import cupy
    except ImportError as error:
        raise LookupError(f"CuPy cannot be imported: {error}") from error
    return _Cupy(cupy)


class _Cupy:
    """`Backend` of real devices."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy

    def module(self, code: str, names: Sequence[str]) -> KernelModule:
        module: KernelModule = self._cupy.RawModule(
            code=code, options=OPTIONS, name_expressions=list(names)
        )
        return module

    @contextlib.contextmanager
    def on_stream(self, device: torch.device) -> Iterator[None]:
        stream = torch.cuda.current_stream(device)  # while capturing: the capturing stream
        wrapped = _external_stream(stream.cuda_stream, stream.device_index)
        with self._cupy.cuda.Device(stream.device_index), wrapped:
            yield


@cache
def _external_stream(address: int, _device: int) -> Any:
    """CuPy's name for one of torch's streams, which torch keeps alive."""
    import cupy

    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return (0, address)

    return cupy.cuda.Stream.from_external(Stream())


def _argument(value: KernelArgument) -> object:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return np.int64(0) if value is None else value


def _forget(kind: str) -> None:
    for key in [key for key in _made if key[2] == kind]:
        del _made[key]


_stand_ins: dict[str, Backend] = {}
_made: dict[tuple[Path, tuple[str, ...], str], Kernels] = {}
