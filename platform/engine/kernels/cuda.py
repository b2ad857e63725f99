"""`EngineOps` on CUDA devices: torch's products, and its compiler's fused elementwise kernels.

The rotation is not here: paged attention takes it over (`PagedAttention.rotates`).
"""

import torch

from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.kernels import reference
from polyloom.platform.engine.kernels.ops import PackedLinear, ReferenceOps, TorchOp, as_written

_WHY = "torch's products and gathers; elementwise ops through torch.compile"


class CudaOps(ReferenceOps):
    """`EngineOps` over weights on one device. Elementwise ops are compiled at their first use, once
    for all numbers of tokens; on another type of device they run as they are written."""

    def __init__(self, capabilities: Capabilities, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        super().__init__(capabilities, "cuda", _WHY, _compiled if on_cuda else as_written)
        self._device = device

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        there = None if bias is None else bias.to(self._device)
        return super().pack_linear(weight.to(self._device), there)

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._ledgers["rope"].fell_back("paged attention does not rotate")
        reference.rope_(q, cos, sin)
        reference.rope_(k, cos, sin)


def _compiled(op: TorchOp) -> TorchOp:
    compiled: TorchOp = torch.compile(op, dynamic=True)
    return compiled
