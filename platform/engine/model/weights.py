"""A checkpoint's weights in the decoder's fused form, one tensor at a time."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from polyloom.adapters.base_layout import CheckpointModule, ModuleGroup
from polyloom.platform.engine.model.checkpoint import Checkpoint
from polyloom.platform.engine.model.config import DecoderConfig
from polyloom.platform.engine.model.errors import CheckpointError
from polyloom.platform.engine.model.layout import (
    EMBEDDING_PATH,
    FINAL_NORM_PATH,
    HEAD_PATH,
    LAYER_PREFIX,
    checkpoint_modules,
    tensor_path,
)

DERIVED_TENSOR = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
"""Old exports store what the config determines; transformers ignores it as well."""

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class FusedLinear:
    """One fused linear: weight `[out, in]`, bias `[out]` or None, both in the engine's dtype."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class FusedWeights:
    """Builds the decoder's tensors from a folder; implements `adapters.weights.BaseWeights`.

    Nothing is kept: each call reads from the mapped files, so the peak is one fused tensor above
    what the caller keeps. `rows` stays usable, from any thread, for as long as the object lives.
    """

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device = _HOST,
    ) -> None:
        """device: where the decoder's tensors go; `rows` are always on the host."""
        self._config = config
        self._dtype = dtype
        self._device = device
        self._checkpoint = Checkpoint(folder)
        self._modules: dict[ModuleGroup, list[CheckpointModule]] = {}
        for module in checkpoint_modules(config):
            self._modules.setdefault(module.group, []).append(module)

    def linear(self, group: ModuleGroup, layer: int) -> FusedLinear:
        """The fused weight and bias of one group in one layer (0 for the head)."""
        modules = self._modules[group]
        out_features = sum(module.out_features for module in modules)
        weight = torch.empty(out_features, modules[0].in_features, dtype=self._dtype)
        bias = torch.empty(out_features, dtype=self._dtype) if modules[0].has_bias else None
        for module in modules:
            rows = slice(module.offset, module.offset + module.out_features)
            weight[rows] = self._weight(module, layer)
            if bias is not None:
                name = f"{tensor_path(module, layer)}.bias"
                bias[rows] = self._checkpoint.tensor(name, (module.out_features,))
        there = None if bias is None else bias.to(self._device)
        return FusedLinear(weight.to(self._device), there)

    def embedding(self) -> torch.Tensor:
        """`[vocab, hidden]`; a view of the mapped file where the dtypes agree.

        Raises CheckpointError if a head that the config ties to it is stored with other values.
        """
        shape = (self._config.vocab_size, self._config.hidden_size)
        embedding = self._checkpoint.tensor(f"{EMBEDDING_PATH}.weight", shape)
        if self._config.tied_head:
            self._check_tied_head(embedding)
        return embedding.to(self._device, self._dtype)

    def _check_tied_head(self, embedding: torch.Tensor) -> None:
        head = f"{HEAD_PATH}.weight"
        if head not in self._checkpoint:
            return
        if not torch.equal(self._checkpoint.tensor(head, tuple(embedding.shape)), embedding):
            raise CheckpointError(
                head, f"differs from {EMBEDDING_PATH}.weight although the config ties them"
            )

    def layer_norm(self, layer: int, name: str) -> torch.Tensor:
        """`[hidden]` of `input_layernorm` and its like."""
        return self._norm(f"{LAYER_PREFIX}.{layer}.{name}", self._config.hidden_size)

    def head_norm(self, layer: int, name: str) -> torch.Tensor:
        """`[head_dim]` of `q_norm` or `k_norm`."""
        return self._norm(f"{LAYER_PREFIX}.{layer}.self_attn.{name}", self._config.head_dim)

    def final_norm(self) -> torch.Tensor:
        """`[hidden]`."""
        return self._norm(FINAL_NORM_PATH, self._config.hidden_size)

    def rows(self, group: ModuleGroup, layer: int, offset: int, out_features: int) -> torch.Tensor:
        """The checkpoint's `[out_features, in_features]` weight rows of a group, as fp32.

        Unrounded, whatever dtype the engine computes in. Raises IndexError beyond the group.
        """
        end = offset + out_features
        parts = [
            self._weight(module, layer)[max(offset, first) - first : end - first].float()
            for module, first, last in self._spans(group)
            if first < end and offset < last
        ]
        rows = torch.cat(parts) if parts else torch.empty(0)
        if rows.shape[0] != out_features:
            raise IndexError(f"rows {offset}..{end} of {group}: the group ends before")
        return rows

    def check_all_read(self) -> None:
        """Raise CheckpointError if the checkpoint holds a tensor that the decoder did not take."""
        unread = [name for name in self._checkpoint.unread() if not DERIVED_TENSOR.search(name)]
        if unread:
            shown = ", ".join(unread[:5]) + (" …" if len(unread) > 5 else "")
            raise CheckpointError(
                unread[0], f"{len(unread)} tensors have no place in the model: {shown}"
            )

    def _spans(self, group: ModuleGroup) -> Iterator[tuple[CheckpointModule, int, int]]:
        for module in self._modules[group]:
            yield module, module.offset, module.offset + module.out_features

    def _weight(self, module: CheckpointModule, layer: int) -> torch.Tensor:
        tied = module.group is ModuleGroup.HEAD and self._config.tied_head
        path = EMBEDDING_PATH if tied else tensor_path(module, layer)
        return self._checkpoint.tensor(f"{path}.weight", (module.out_features, module.in_features))

    def _norm(self, path: str, size: int) -> torch.Tensor:
        return self._checkpoint.tensor(f"{path}.weight", (size,)).to(
            self._device, self._dtype, copy=True
        )
