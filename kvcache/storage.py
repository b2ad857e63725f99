"""The memory of the paged cache."""

import torch

from polyloom.kvcache.config import KVCacheConfig


class KVStorage:
    """K and V of every layer, one tensor each.

    keys, values: `[num_layers, num_blocks, num_kv_heads, block_size, head_dim]` of `config.dtype`.
    The order of the elements within one (layer, block, head) is the attention implementation's
    own: only the one that wrote a cache can read it.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        shape = (
            config.num_layers,
            config.num_blocks,
            config.num_kv_heads,
            config.block_size,
            config.head_dim,
        )
        # Zeros come from the system untouched, so memory grows with use, not at the start.
        self.keys = torch.zeros(shape, dtype=config.dtype, device=config.device)
        self.values = torch.zeros(shape, dtype=config.dtype, device=config.device)

    def copy_block(self, source: int, target: int) -> None:
        """Give block `target` the content of block `source`, in all layers."""
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]
