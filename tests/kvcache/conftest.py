"""Random paged batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.config import KVCacheConfig
from polyloom.kvcache.manager import KVCacheManager


@dataclass
class PagedContexts:
    """Sequences that grow step by step over one pool with its blocks shuffled."""

    config: KVCacheConfig
    manager: KVCacheManager
    lengths: list[int]

    def step(self, new_tokens: Sequence[int]) -> AttentionBatch:
        """Sequence i gets `new_tokens[i] > 0` more tokens."""
        starts, slots, positions = [0], [], []
        for i, count in enumerate(new_tokens):
            before, self.lengths[i] = self.lengths[i], self.lengths[i] + count
            self.manager.reserve(str(i), self.lengths[i])
            positions += range(before, self.lengths[i])
            slots += [self.manager.slot(str(i), p) for p in range(before, self.lengths[i])]
            starts.append(starts[-1] + count)
        tables = [torch.tensor(self.manager.blocks(str(i))) for i in range(len(new_tokens))]
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True, padding_value=-1)
        return AttentionBatch(
            query_starts=torch.tensor(starts, dtype=torch.int32),
            context_lens=torch.tensor(self.lengths, dtype=torch.int32),
            block_tables=padded.to(torch.int32),
            slot_mapping=torch.tensor(slots),
            positions=torch.tensor(positions),
        )


@pytest.fixture(scope="session")
def paged_contexts() -> Callable[..., PagedContexts]:
    def build(
        sequences: int,
        max_tokens: int,
        *,
        heads: int = 2,
        head_dim: int = 32,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        layers: int = 1,
        seed: int = 0,
    ) -> PagedContexts:
        num_blocks = sequences * -(-max_tokens // block_size) + 3
        config = KVCacheConfig(
            layers, heads, head_dim, block_size, num_blocks, dtype, torch.device("cpu")
        )
        pool = BlockPool(num_blocks)
        blocks = pool.allocate(num_blocks)
        generator = torch.Generator().manual_seed(seed)
        pool.free(blocks[i] for i in torch.randperm(num_blocks, generator=generator).tolist())
        return PagedContexts(config, KVCacheManager(pool, block_size), [0] * sequences)

    return build
