"""`EngineOps` in C++ for float and bfloat16 on the CPU."""

from pathlib import Path

import torch
import torch.nn.functional as F

from polyloom.kvcache.kernels.build import load_cpu_ops
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.kernels import reference
from polyloom.platform.engine.kernels.ops import OP_NAMES, PackedLinear

SOURCES = tuple(Path(__file__).with_name(name) for name in ("linear.cpp", "elementwise.cpp"))
_LANES = 16
_INPUT_STEP = 32
_DTYPES = (torch.float32, torch.bfloat16)
_WHY = "C++ for this processor"


class CpuOps:
    """`EngineOps` in C++; what it does not cover runs on `reference` and is counted so.

    bfloat16 weights are packed and held in that form alone. float32 products are torch's own.
    """

    def __init__(self, capabilities: Capabilities) -> None:
        self._ledgers = {name: capabilities.register(name, "cpu", _WHY) for name in OP_NAMES}
        self._missing = load_cpu_ops("polyloom_engine", SOURCES)
        self._ops = torch.ops.polyloom_engine

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        out_features, in_features = weight.shape
        reason = self._unpackable(weight)
        data = self._ops.pack(weight) if reason is None else weight
        return PackedLinear(data, out_features, in_features, bias, reason)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        if not self._engages("linear", packed.plain_because):
            return F.linear(x, packed.data, packed.bias)
        y: torch.Tensor = self._ops.linear(
            x, packed.data, packed.bias, packed.out_features, packed.in_features
        )
        return y

    def embedding(self, ids: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        if not self._engages("embedding", packed.plain_because):
            return F.embedding(ids, packed.data)
        rows: torch.Tensor = self._ops.gather_rows(
            packed.data, ids, packed.out_features, packed.in_features
        )
        return rows

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
    ) -> torch.Tensor:
        if not self._engages("rms_norm", self._uncovered(x, x.shape[-1])):
            return reference.rms_norm(x, weight, eps, plus_one=plus_one)
        normed: torch.Tensor = self._ops.rms_norm(x, weight, eps, plus_one)
        return normed

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        plus_one: bool = False,
    ) -> torch.Tensor:
        if not self._engages("add_rms_norm", self._uncovered(x, x.shape[-1])):
            return reference.rms_norm(residual.add_(x), weight, eps, plus_one=plus_one)
        normed: torch.Tensor = self._ops.add_rms_norm(x, residual, weight, eps, plus_one)
        return normed

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self._engages("silu_mul", self._uncovered(gate_up, gate_up.shape[-1] // 2)):
            return reference.silu_mul(gate_up)
        product: torch.Tensor = self._ops.silu_mul(gate_up)
        return product

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        if not self._engages("gelu_tanh_mul", self._uncovered(gate_up, gate_up.shape[-1] // 2)):
            return reference.gelu_tanh_mul(gate_up)
        product: torch.Tensor = self._ops.gelu_tanh_mul(gate_up)
        return product

    def rope_(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        if self._engages("rope", self._uncovered(q, _LANES)):
            self._ops.rope_(q, k, cos, sin)
            return
        reference.rope_(q, cos, sin)
        reference.rope_(k, cos, sin)

    def _unpackable(self, weight: torch.Tensor) -> str | None:
        """Why a weight must stay plain; None if it can be packed."""
        if self._missing is not None:
            return self._missing
        if weight.dtype is not torch.bfloat16:
            return f"{weight.dtype} products are torch's own"
        if weight.shape[1] % _INPUT_STEP:
            return f"in_features {weight.shape[1]} is not a multiple of {_INPUT_STEP}"
        if not self._ops.accelerated():
            return "this processor has no AVX512-BF16"
        return None

    def _uncovered(self, x: torch.Tensor, width: int) -> str | None:
        """Why a row-wise op cannot take x with rows of `width`; None if it can."""
        if self._missing is not None:
            return self._missing
        if x.dtype not in _DTYPES:
            return f"dtype {x.dtype}"
        if width % _LANES:
            return f"width {width} is not a multiple of {_LANES}"
        return None

    def _engages(self, name: str, reason: str | None) -> bool:
        """Count the call of `name`; whether the C++ op takes it."""
        ledger = self._ledgers[name]
        if reason is not None:
            ledger.fell_back(reason)
            return False
        ledger.engaged += 1
        return True
