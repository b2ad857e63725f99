"""The decoder's linears read from disk each time they are used, for a base that does not fit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from polyloom.adapters.base_layout import ModuleGroup
from polyloom.platform.engine.kernels.ops import EngineOps, PackedLinear
from polyloom.platform.engine.model.config import DecoderConfig
from polyloom.platform.engine.model.weights import FusedLinear, FusedWeights


class StreamedWeights(FusedWeights):
    """Hands out weights on the meta device, and reads one when `read` is asked for it."""

    def __init__(self, folder: Path, config: DecoderConfig, dtype: torch.dtype) -> None:
        super().__init__(folder, config, dtype)
        self._readers: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}

    def linear(self, group: ModuleGroup, layer: int) -> FusedLinear:
        """The bias is real. The weight is read once for its shape, and dropped."""
        real = super().linear(group, layer)
        reader = partial(self._read_linear, group, layer)
        return FusedLinear(self._placeholder(real.weight, reader), real.bias)

    def embedding(self) -> torch.Tensor:
        """`[vocab, hidden]` on the meta device."""
        return self._placeholder(super().embedding(), super().embedding)

    def read(self, placeholder: torch.Tensor) -> torch.Tensor:
        """The weight that `placeholder` stands for; the caller drops it after use."""
        return self._readers[id(placeholder)][1]()

    def _read_linear(self, group: ModuleGroup, layer: int) -> torch.Tensor:
        return super().linear(group, layer).weight

    def _placeholder(self, real: torch.Tensor, reader: Callable[[], torch.Tensor]) -> torch.Tensor:
        placeholder = torch.empty_like(real, device="meta")
        # Held here as well, so that its id stays its own.
        self._readers[id(placeholder)] = placeholder, reader
        return placeholder


class StreamedOps:
    """`EngineOps` over placeholders: packs a weight, uses it once and drops it."""

    def __init__(self, ops: EngineOps, weights: StreamedWeights) -> None:
        self._ops = ops
        self._weights = weights
        self.rms_norm = ops.rms_norm
        self.add_rms_norm = ops.add_rms_norm
        self.silu_mul = ops.silu_mul
        self.gelu_tanh_mul = ops.gelu_tanh_mul
        self.rope_ = ops.rope_

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Keep the placeholder in place of packed data."""
        return PackedLinear(weight, weight.shape[0], weight.shape[1], bias)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """`x Wᵀ + bias`, W read now."""
        return self._ops.linear(x, self._real(packed))

    def embedding(self, ids: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """Rows `ids`, the table read now."""
        return self._ops.embedding(ids, self._real(packed))

    def _real(self, packed: PackedLinear) -> PackedLinear:
        return self._ops.pack_linear(self._weights.read(packed.data), packed.bias)
