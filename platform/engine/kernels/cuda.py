"""`EngineOps` on CUDA devices: torch's products, and its compiler's fused elementwise kernels.

The rotation is not here: paged attention takes it over (`PagedAttention.rotates`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.kernels import reference
from polyloom.platform.engine.kernels.ops import OP_NAMES, PackedLinear


class CudaOps:
    """`EngineOps` over weights on one device. Elementwise ops are compiled at their first use, once
    for all numbers of tokens; on another type of device they run as they are written."""

    def __init__(self, capabilities: Capabilities, device: torch.device) -> None:
        self._ledgers = {name: capabilities.register(name, "cuda") for name in OP_NAMES}
        self._device = device
        self._rms_norm = self._compiled(reference.rms_norm)
        self._add_rms_norm = self._compiled(_add_rms_norm)
        self._silu_mul = self._compiled(reference.silu_mul)
        self._gelu_tanh_mul = self._compiled(reference.gelu_tanh_mul)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        there = None if bias is None else bias.to(self._device)
        return PackedLinear(weight.to(self._device), weight.shape[0], weight.shape[1], there)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        self._ledgers["linear"].engaged += 1
        return F.linear(x, packed.data, packed.bias)

    def embedding(self, ids: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        self._ledgers["embedding"].engaged += 1
        return F.embedding(ids, packed.data)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
    ) -> torch.Tensor:
        self._ledgers["rms_norm"].engaged += 1
        return self._rms_norm(x, weight, eps, plus_one=plus_one)

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        plus_one: bool = False,
    ) -> torch.Tensor:
        self._ledgers["add_rms_norm"].engaged += 1
        return self._add_rms_norm(x, residual, weight, eps, plus_one=plus_one)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        self._ledgers["silu_mul"].engaged += 1
        return self._silu_mul(gate_up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        self._ledgers["gelu_tanh_mul"].engaged += 1
        return self._gelu_tanh_mul(gate_up)

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._ledgers["rope"].fell_back("paged attention does not rotate")
        reference.rope_(q, cos, sin)
        reference.rope_(k, cos, sin)

    def _compiled(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        if self._device.type != "cuda":
            return function
        compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
        return compiled


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool
) -> torch.Tensor:
    return reference.rms_norm(residual.add_(x), weight, eps, plus_one=plus_one)
