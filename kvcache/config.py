"""Shape of the paged KV cache of one base."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVCacheConfig:
    """Sizes of the paged cache; heads are KV heads, never expanded to query heads."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: torch.dtype
    device: torch.device

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return per_token * self.block_size * self.dtype.itemsize


def blocks_for_memory(config_without_blocks: KVCacheConfig, memory_bytes: int) -> int:
    """How many blocks fit in `memory_bytes`."""
    return memory_bytes // config_without_blocks.block_bytes
