"""How one step's packed tokens map to sequences and their cached context."""

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class AttentionBatch:
    """Metadata of T packed tokens of S sequences; no padding anywhere but in `block_tables`.

    query_starts: [S + 1] int32, sequence s owns tokens `[query_starts[s], query_starts[s + 1])`,
        which are the last ones of its context, in order.
    context_lens: [S] int32, tokens of s in the cache once this step's are appended.
    block_tables: [S, M] int32, block of every `block_size` tokens of s; -1 beyond its end.
    slot_mapping: [T] int64, `block * block_size + offset` where each token's K and V go.
    positions: [T] int64, position of each token in its sequence.

    All tensors are on the host: an implementation on a device copies what it needs, once a step.
    """

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]

    def to(self, device: torch.device) -> "AttentionBatch":
        """The same with its tensors on `device`."""
        return AttentionBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    @property
    def num_sequences(self) -> int:
        return self.context_lens.shape[0]
