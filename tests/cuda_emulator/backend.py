"""The emulator as a device of the engine: what `polyloom.kvcache.kernels.cuda` asks of CuPy."""

import contextlib
from collections.abc import Iterator, Sequence

import torch

from polyloom.kvcache.kernels.cuda import OPTIONS
from tests.cuda_emulator.emulator import UNDEFINED_BEHAVIOUR, RawModule, Traffic


class EmulatedDevice:
    """A `Backend` over CPU tensors. modules: all that were made, in order."""

    def __init__(self, checks: Sequence[str] = UNDEFINED_BEHAVIOUR, seed: int = 1) -> None:
        self.modules: list[RawModule] = []
        self._checks = checks
        self._seed = seed

    def module(self, code: str, names: Sequence[str]) -> RawModule:
        made = RawModule(
            code=code,
            options=OPTIONS,
            name_expressions=names,
            checks=self._checks,
            seed=self._seed,
        )
        self.modules.append(made)
        return made

    def traffic(self) -> Traffic:
        """Of all launches since the last call."""
        moved = [module.traffic() for module in self.modules]
        return Traffic(sum(m.loaded for m in moved), sum(m.stored for m in moved))

    @contextlib.contextmanager
    def on_stream(self, device: torch.device) -> Iterator[None]:
        yield
