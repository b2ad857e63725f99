"""Attention over the paged cache: one object per engine, one call per layer and step."""

from typing import Literal

import torch

from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.config import KVCacheConfig
from polyloom.kvcache.kernels import cpu, reference
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.kvcache.storage import KVStorage

OP_NAME = "paged_attention"


class PagedAttention:
    """Appends a step's K and V to the cache and attends causally over each token's context."""

    def __init__(
        self,
        config: KVCacheConfig,
        storage: KVStorage,
        num_heads: int,
        implementation: Literal["reference", "cpu"],
        capabilities: Capabilities,
    ) -> None:
        """num_heads: query heads, a multiple of `config.num_kv_heads`.

        Where `cpu` does not cover the cache's shape or cannot be built, every call falls back to
        `reference` and is counted as such.
        """
        if num_heads % config.num_kv_heads:
            raise ValueError(
                f"num_heads {num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}"
            )
        self._storage = storage
        self._ledger = capabilities.register(OP_NAME, implementation)
        self._uncovered = cpu.load(config) if implementation == "cpu" else None
        self._use_cpu = implementation == "cpu" and self._uncovered is None

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attention of the step's T tokens in one layer, `[T, num_heads * head_dim]`.

        q [T, num_heads, head_dim] and k, v [T, num_kv_heads, head_dim], rotary embedding applied,
        of the cache's dtype; views of one packed tensor will do, the last dimension contiguous.
        window: a token at position p attends to positions in `(p - window, p]`; None for all.
        softcap: scores become `softcap * tanh(scale * q·k / softcap)`; None for none.
        """
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        if self._uncovered is None:
            self._ledger.engaged += 1
        else:
            self._ledger.fell_back(self._uncovered)
        if self._use_cpu:
            return cpu.paged_attention(
                q, k, v, keys, values, batch, scale=scale, window=window, softcap=softcap
            )
        reference.append(keys, values, k, v, batch.slot_mapping)
        return reference.attend(q, keys, values, batch, scale=scale, window=window, softcap=softcap)
