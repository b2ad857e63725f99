"""What one step's launches of paged attention read, on the device.

A plan of a captured graph lies in a frame: memory that does not move, of sizes that fit every step
the graph is for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.kernels.device_arrays import filled, to_device

MAX_QUERIES = 8
_WANTED_BLOCKS = 528  # four on each of 132 processors
_CONTEXT_A_SPLIT = 256
_MAX_SPLITS = 64


@dataclass(frozen=True)
class AttentionPlan:
    """What one step's launches read, on the device. See `attention.cu` for the shapes.

    max_count: most new tokens of a sequence that is attended to from its blocks.
    prefill: (first token, tokens, context, row of the block tables) of each longer chunk.
    """

    sequences: torch.Tensor
    compact: torch.Tensor
    tables: torch.Tensor
    token_of: torch.Tensor
    slots: torch.Tensor
    max_count: int
    splits: int
    prefill: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True)
class AttentionFrame:
    """What a captured graph fixes of its plans: sizes, and the memory that they lie in.

    tokens: of a step, and so its most sequences.  blocks: of the longest context.  max_count, splits:
    as in `AttentionPlan`.  memory: uint8 on the device, `frame_bytes` long.
    """

    tokens: int
    blocks: int
    max_count: int
    splits: int
    memory: torch.Tensor


def attention_frame(
    tokens: int, blocks: int, block_size: int, max_count: int, device: torch.device
) -> AttentionFrame:
    """A frame for steps of up to `tokens` tokens over contexts of up to `blocks` blocks."""
    num_bytes = 4 * tokens * (4 + 1 + blocks + 1) + 8 * tokens + 5 * 16
    memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return AttentionFrame(tokens, blocks, max_count, _splits(tokens, blocks * block_size), memory)


def plan_attention(
    batch: AttentionBatch, device: torch.device, frame: AttentionFrame | None = None
) -> AttentionPlan:
    """Sort a step's sequences into those attended to from their blocks, and longer chunks.

    frame: lay the plan out in it, filled up with empty sequences and with tokens that go nowhere.
    """
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    sequences, compact, prefill = [], [], []
    token_of: list[int] = []
    for s, context in enumerate(contexts):
        first, count = starts[s], starts[s + 1] - starts[s]
        if count > MAX_QUERIES:
            prefill.append((first, count, context, s))
        elif count:
            sequences.append((first, count, context, s))
            compact.append(len(token_of))
            token_of += range(first, first + count)
    arrays: list[NDArray[Any]] = [
        np.array(sequences, dtype=np.int32).reshape(-1, 4),
        np.array(compact, dtype=np.int32),
        batch.block_tables.numpy(),
        np.array(token_of, dtype=np.int32),
        batch.slot_mapping.numpy(),
    ]
    if frame is None:
        longest = max((s[2] for s in sequences), default=0)
        max_count, splits = (
            max((s[1] for s in sequences), default=0),
            _splits(len(sequences), longest),
        )
        return AttentionPlan(*_tensors(arrays, device), max_count, splits, tuple(prefill))
    if prefill or starts[-1] > frame.tokens or arrays[2].shape[1] > frame.blocks:
        raise ValueError(f"a step of {starts[-1]} tokens does not fit a frame of {frame.tokens}")
    shapes = ((frame.tokens, 4), (frame.tokens,), (frame.tokens, frame.blocks), (frame.tokens,))
    padded = [
        filled(array, shape, value)
        for array, shape, value in zip(
            arrays, (*shapes, (frame.tokens,)), (0, 0, 0, -1, -1), strict=True
        )
    ]
    there = _tensors(padded, device, frame.memory)
    return AttentionPlan(*there, frame.max_count, frame.splits, ())


def _splits(sequences: int, longest: int) -> int:
    """Into how many parts each context is split, so that few long ones still fill a device."""
    if sequences == 0:
        return 1
    wanted = -(-_WANTED_BLOCKS // sequences)
    return max(1, min(wanted, longest // _CONTEXT_A_SPLIT, _MAX_SPLITS))


def _tensors(
    arrays: Sequence[NDArray[Any]], device: torch.device, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    sequences, compact, tables, token_of, slots = to_device(arrays, device, into)
    return sequences, compact, tables, token_of, slots
