"""Shape of the paged KV cache of one base."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVCacheConfig:
    """Sizes of the paged cache; heads are KV heads, never expanded to query heads.

    dtype: of the activations, and of the cache unless eight_bits: then K and V are int8, with an
    fp32 scale for each token and head.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    dtype: torch.dtype
    device: torch.device
    eight_bits: bool = False

    @property
    def stored(self) -> torch.dtype:
        """What K and V are stored as."""
        return torch.int8 if self.eight_bits else self.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        scale = torch.float32.itemsize if self.eight_bits else 0
        row = self.head_dim * self.stored.itemsize + scale
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * row


def blocks_for_memory(config_without_blocks: KVCacheConfig, memory_bytes: int) -> int:
    """How many blocks fit in `memory_bytes`."""
    return memory_bytes // config_without_blocks.block_bytes
