"""The ops that the decoder is made of, whatever runs them.

Attention and LoRA are not here: they belong to the cache and to the adapters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.kernels import reference

TorchOp = Callable[..., torch.Tensor]

OP_NAMES = ("linear", "embedding", "rms_norm", "add_rms_norm", "silu_mul", "gelu_tanh_mul", "rope")


@dataclass(frozen=True)
class PackedLinear:
    """A linear's weight in the form that the ops which packed it read.

    data: the implementation's own layout; the only copy of the weight.
    bias: [out_features] or None.
    plain_because: why `data` is the plain [O, I] weight although a packed form was wanted.
    """

    data: torch.Tensor
    out_features: int
    in_features: int
    bias: torch.Tensor | None
    plain_because: str | None = None


class EngineOps(Protocol):
    """One step's building blocks. Tensors are packed tokens first; T is their number."""

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Take over a weight `[O, I]` (and bias `[O]`); the caller may drop its own."""
        ...

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """`x Wᵀ + bias`: [T, I] → [T, O]; fp32 accumulation, x's dtype out."""
        ...

    def embedding(self, ids: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """Rows `ids` [T] int64 of the packed weight, [T, I] in its dtype, exactly."""
        ...

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
    ) -> torch.Tensor:
        """See `reference.rms_norm`. x: [T, N] or [T, heads, N], last dimension contiguous."""
        ...

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        plus_one: bool = False,
    ) -> torch.Tensor:
        """`residual += x` in place, rounded to its dtype; returns rms_norm of it. Both [T, N]."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`: [T, 2F] → [T, F]."""
        ...

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """`gelu_tanh(gate) * up`: [T, 2F] → [T, F]."""
        ...

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate q [T, H, D] and k [T, G, D] in place; cos, sin [T, R ≤ D] as transformers' rotary
        embedding gives them. Views of one packed tensor will do, last dimension contiguous."""
        ...


def as_written(op: TorchOp) -> TorchOp:
    """An elementwise function that is not compiled."""
    return op


class ReferenceOps:
    """`EngineOps` in plain torch.

    implementation: the name that the capabilities show, and why.  compiled: what is done to the
    elementwise functions before they are used.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        implementation: str = "reference",
        why: str = "plain torch",
        compiled: Callable[[TorchOp], TorchOp] = as_written,
    ) -> None:
        self._ledgers = {
            name: capabilities.register(name, implementation, why) for name in OP_NAMES
        }
        self._rms_norm = compiled(reference.rms_norm)
        self._add_rms_norm = compiled(_add_rms_norm)
        self._silu_mul = compiled(reference.silu_mul)
        self._gelu_tanh_mul = compiled(reference.gelu_tanh_mul)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        return PackedLinear(weight, weight.shape[0], weight.shape[1], bias)

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
        self._ledgers["rope"].engaged += 1
        reference.rope_(q, cos, sin)
        reference.rope_(k, cos, sin)


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool
) -> torch.Tensor:
    return reference.rms_norm(residual.add_(x), weight, eps, plus_one=plus_one)
