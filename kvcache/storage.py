"""The memory of the paged cache."""

import torch

from polyloom.kvcache.config import KVCacheConfig


class KVStorage:
    """K and V of every layer, one tensor each.

    keys, values: `[num_layers, num_blocks, num_kv_heads, block_size, head_dim]` of `config.stored`.
    The order of the elements within one (layer, block, head) is the attention implementation's
    own: only the one that wrote a cache can read it.
    scales: of keys and of values, the same without head_dim, fp32; None unless `eight_bits`.
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
        self.keys, self.values = (
            torch.zeros(shape, dtype=config.stored, device=config.device) for _ in range(2)
        )
        self.scales: tuple[torch.Tensor, torch.Tensor] | None = None
        if config.eight_bits:
            self.scales = (
                torch.zeros(shape[:-1], device=config.device),
                torch.zeros(shape[:-1], device=config.device),
            )

    def copy_block(self, source: int, target: int) -> None:
        """Give block `target` the content of block `source`, in all layers."""
        for part in (self.keys, self.values, *(self.scales or ())):
            part[:, target] = part[:, source]
