"""Where the packed tokens of a step lie in the paged cache."""

from collections.abc import Sequence

import numpy as np
import torch

from polyloom.kvcache.batch import AttentionBatch


def attention_batch(
    tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    counts: Sequence[int],
    block_size: int,
) -> AttentionBatch:
    """Sequence s runs its tokens `[starts[s], starts[s] + counts[s])`; tables[s] are its blocks."""
    lengths = np.array(counts, dtype=np.int32)
    query_starts = np.zeros(len(tables) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    block_tables = np.full((len(tables), max(map(len, tables))), -1, dtype=np.int32)
    for row, table in enumerate(tables):
        block_tables[row, : len(table)] = table
    first = np.array(starts, dtype=np.int64)
    row_of_token = np.repeat(np.arange(len(tables)), lengths)
    within = np.arange(query_starts[-1]) - query_starts[:-1][row_of_token]
    positions = first[row_of_token] + within
    blocks, offsets = np.divmod(positions, block_size)
    slots = block_tables[row_of_token, blocks].astype(np.int64) * block_size + offsets
    return AttentionBatch(
        query_starts=torch.from_numpy(query_starts),
        context_lens=torch.from_numpy((first + lengths).astype(np.int32)),
        block_tables=torch.from_numpy(block_tables),
        slot_mapping=torch.from_numpy(slots),
        positions=torch.from_numpy(positions),
    )
