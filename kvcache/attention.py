"""Attention over the paged cache: one object per engine, one call per layer and step."""

from typing import Literal

import torch

from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.config import KVCacheConfig
from polyloom.kvcache.kernels import cpu, cuda_attention, cuda_attention_ops, reference
from polyloom.kvcache.kernels.cuda_attention import Rotation
from polyloom.kvcache.kernels.cuda_attention_plan import (
    MAX_QUERIES,
    AttentionPlan,
    plan_attention,
)
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.kvcache.storage import KVStorage

OP_NAME = "paged_attention"
PREFILL_OP_NAME = "prefill_attention"

Implementation = Literal["reference", "cpu", "cuda"]
_WHY: dict[Implementation, str] = {
    "reference": "plain torch",
    "cpu": "C++ for this processor",
    "cuda": f"reads blocks in place for up to {MAX_QUERIES} new tokens a sequence",
}


class PagedAttention:
    """Appends a step's K and V to the cache and attends causally over each token's context."""

    def __init__(
        self,
        config: KVCacheConfig,
        storage: KVStorage,
        num_heads: int,
        implementation: Implementation,
        capabilities: Capabilities,
    ) -> None:
        """num_heads: query heads, a multiple of `config.num_kv_heads`.

        Where `implementation` does not cover the cache's shape or cannot be built, every call falls
        back to `reference` and is counted as such. Only the CUDA kernels know a cache of 8 bits:
        ValueError where they cannot serve it.
        """
        if num_heads % config.num_kv_heads:
            raise ValueError(
                f"num_heads {num_heads} is not a multiple of num_kv_heads {config.num_kv_heads}"
            )
        self._storage = storage
        self._uncovered = _uncovered(implementation, config)
        self._running = implementation if self._uncovered is None else "reference"
        if config.eight_bits and self._running != "cuda":
            reason = self._uncovered or f"{implementation} has none"
            raise ValueError(f"a cache of 8 bits needs the CUDA kernels: {reason}")
        compiled: tuple[str, ...] = ()
        seconds = 0.0
        if self._running == "cuda":
            compiled, seconds = cuda_attention_ops.compile_kernels(config)
        self._ledger = capabilities.register(
            OP_NAME, implementation, _why(implementation, config), compiled, seconds
        )
        self._device = config.device
        self._planned: tuple[AttentionBatch, AttentionPlan] | None = None
        if self._running == "cuda":
            why = f"chunks over {MAX_QUERIES} tokens are bound by arithmetic"
            self._prefill = capabilities.register(PREFILL_OP_NAME, "torch", why)

    @property
    def rotates(self) -> bool:
        """It takes queries and keys unrotated, with their rotation."""
        return self._running == "cuda"

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
        rotation: Rotation | None = None,
    ) -> torch.Tensor:
        """Attention of the step's T tokens in one layer, `[T, num_heads * head_dim]`.

        q [T, num_heads, head_dim] and k, v [T, num_kv_heads, head_dim], rotary embedding applied,
        of the cache's dtype; views of one packed tensor will do, the last dimension contiguous.
        rotation: cos and sin [T, R] of an embedding yet to be applied, for one that `rotates`; q
        may be changed then.
        window: a token at position p attends to positions in `(p - window, p]`; None for all.
        softcap: scores become `softcap * tanh(scale * q·k / softcap)`; None for none.
        """
        keys, values = self._storage.keys[layer], self._storage.values[layer]
        if self._uncovered is None:
            self._ledger.engaged += 1
        else:
            self._ledger.fell_back(self._uncovered)
        if self._running == "cuda":
            plan = self._plan(batch)
            self._prefill.engaged += len(plan.prefill)
            scales = self._scales(layer)
            cuda_attention.append(q, k, v, keys, values, scales, plan.slots, rotation)
            return cuda_attention.attend(
                q, keys, values, scales, plan, scale=scale, window=window, softcap=softcap
            )
        if self._running == "cpu":
            return cpu.paged_attention(
                q, k, v, keys, values, batch, scale=scale, window=window, softcap=softcap
            )
        batch = batch.to(self._device)
        reference.append(keys, values, k, v, batch.slot_mapping)
        return reference.attend(q, keys, values, batch, scale=scale, window=window, softcap=softcap)

    def copy_block(self, source: int, target: int) -> None:
        """Give block `target` the content of block `source`, in all layers."""
        storage = self._storage
        if self._running != "cuda":
            storage.copy_block(source, target)
            return
        for parts in ((storage.keys, storage.values), storage.scales):
            if parts is not None:
                cuda_attention.copy_blocks(*parts, [(source, target)])

    def use(self, batch: AttentionBatch, plan: AttentionPlan) -> None:
        """Run `batch` by this plan: that of a graph's frame."""
        self._planned = batch, plan

    def _scales(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        scales = self._storage.scales
        return None if scales is None else (scales[0][layer], scales[1][layer])

    def _plan(self, batch: AttentionBatch) -> AttentionPlan:
        """A step's plan, made at its first layer and kept for the others."""
        if self._planned is None or self._planned[0] is not batch:
            self._planned = batch, plan_attention(batch, self._device)
        return self._planned[1]


def _why(implementation: Implementation, config: KVCacheConfig) -> str:
    stored = "; K and V in 8 bits with a scale a token and head" if config.eight_bits else ""
    return _WHY[implementation] + stored


def _uncovered(implementation: Implementation, config: KVCacheConfig) -> str | None:
    """Why it cannot serve this cache; None if it can."""
    if implementation == "cpu":
        return cpu.load(config)
    if implementation == "cuda":
        return cuda_attention_ops.uncovered(config, config.device.type)
    return None
