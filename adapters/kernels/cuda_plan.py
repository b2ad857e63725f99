"""What one step's launches of the LoRA kernels read, on the device.

Tokens of one revision are gathered from wherever they lie in the batch into tiles of up to 16, so
its pages are read once a tile. A plan of a captured graph lies in a frame: memory that does not move.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from polyloom.adapters.base_layout import GroupShape
from polyloom.adapters.config import PAGE_RANKS
from polyloom.adapters.group_pool import GroupPool
from polyloom.adapters.kernels.cuda_launch import TILE, padded
from polyloom.adapters.segments import LoraBatch
from polyloom.kvcache.kernels.device_arrays import filled, to_device

MATMUL_TOKENS = 64
_SPAN = 512
_MAX_SLICES = 3


@dataclass(frozen=True)
class LoraPlan:
    """What one step's launches on one group read, on the device. See `lora.cu` for the shapes.

    matmul: (first token, end, row of the page table) of each segment left to torch.
    """

    tiles: torch.Tensor
    order: torch.Tensor
    pages: torch.Tensor
    masks: torch.Tensor
    rows: torch.Tensor
    partial: torch.Tensor
    matmul: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class LoraFrame:
    """What a captured graph fixes of its plans of one group: sizes, and the memory they lie in.

    tokens: of a step, and so its most tiles and segments.  width: pages of the largest rank.
    memory: uint8.  partial: as in `LoraPlan`.
    """

    tokens: int
    width: int
    memory: torch.Tensor
    partial: torch.Tensor


def lora_frame(pool: GroupPool, tokens: int, max_rank: int, device: torch.device) -> LoraFrame:
    """A frame for steps of up to `tokens` tokens of revisions of up to `max_rank`."""
    width = -(-max_rank // PAGE_RANKS)
    words = tokens * (4 + 1 + 2 * width + pool.shape.layers * width + 2)
    memory = torch.zeros(4 * words + 5 * 16, dtype=torch.uint8, device=device)
    return LoraFrame(tokens, width, memory, _partial(pool.shape, tokens, width, device))


def plan_group(
    pool: GroupPool, batch: LoraBatch, device: torch.device, frame: LoraFrame | None = None
) -> LoraPlan:
    """Gather a batch's tokens into tiles, and what their revisions' pages are.

    frame: lay the plan out in it, filled up with empty tiles.
    """
    shape = pool.shape
    if len(shape.slices) > _MAX_SLICES:
        raise ValueError(f"{shape.group} has {len(shape.slices)} slices, at most {_MAX_SLICES}")
    table = batch.pages.get(shape.group)
    page_ids = _page_ids(table, len(batch.slots))
    counts = (page_ids >= 0).sum(1)
    width = max(int(counts.max()), 1)
    page_ids = page_ids[:, :width]
    present = page_ids >= 0
    pages = np.where(present, pool.addresses.numpy()[page_ids], 0)
    masks = np.where(present, pool.masks.numpy()[page_ids].transpose(2, 0, 1), 0).astype(np.int32)
    rows = np.where(batch.slots.numpy() >= 0, pool.row_addresses.numpy()[batch.slots.numpy()], 0)
    touched = [g for g in range(len(rows)) if counts[g] or rows[g]]
    longest = MATMUL_TOKENS if frame is None else frame.tokens + 1
    long, tiles, order = _tiles(batch, touched, counts, longest)
    arrays: list[NDArray[Any]] = [tiles, order, pages, masks, rows]
    if frame is None:
        partial = _partial(shape, len(order), width, device)
        return LoraPlan(*_tensors(arrays, device), partial, long)
    if int(batch.starts[-1]) > frame.tokens or width > frame.width:
        raise ValueError(f"a step of {int(batch.starts[-1])} tokens does not fit its frame")
    t, w = frame.tokens, frame.width
    shapes = ((t, 4), (t,), (t, w), (shape.layers, t, w), (t,))
    filled_up = [filled(array, size, 0) for array, size in zip(arrays, shapes, strict=True)]
    return LoraPlan(*_tensors(filled_up, device, frame.memory), frame.partial, ())


def _tensors(
    arrays: Sequence[NDArray[Any]], device: torch.device, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tiles, order, pages, masks, rows = to_device(arrays, device, into)
    return tiles, order, pages, masks, rows


def _partial(shape: GroupShape, tokens: int, width: int, device: torch.device) -> torch.Tensor:
    """Room for what `lora_shrink` writes: [splits, tokens, width * slices * 8] fp32."""
    ranks = width * len(shape.slices) * PAGE_RANKS
    splits = -(-padded(shape.in_features) // _SPAN)
    return torch.empty(splits, tokens, ranks, dtype=torch.float32, device=device)


def _page_ids(table: torch.Tensor | None, segments: int) -> NDArray[np.int32]:
    """[G, M ≥ 1], -1 where a segment has no more."""
    if table is None:
        return np.full((segments, 1), -1, dtype=np.int32)
    ids: NDArray[np.int32] = table.numpy()
    return ids


def _tiles(
    batch: LoraBatch, touched: Sequence[int], counts: NDArray[np.int64], matmul_tokens: int
) -> tuple[tuple[tuple[int, int, int], ...], NDArray[np.int32], NDArray[np.int32]]:
    """Segments for torch; tiles `[n, 4]` (first, count, row, pages); the tokens that they gather.

    Segments of less than `matmul_tokens` of one slot share tiles wherever they lie.
    """
    starts, slots = batch.starts.tolist(), batch.slots.tolist()
    long: list[tuple[int, int, int]] = []
    gathered: dict[int, tuple[int, list[int]]] = {}
    for g in touched:
        if starts[g + 1] - starts[g] >= matmul_tokens:
            long.append((starts[g], starts[g + 1], g))
        else:
            gathered.setdefault(slots[g], (g, []))[1].extend(range(starts[g], starts[g + 1]))
    tiles: list[tuple[int, int, int, int]] = []
    order: list[int] = []
    for row, tokens in gathered.values():
        for first in range(0, len(tokens), TILE):
            count = min(TILE, len(tokens) - first)
            tiles.append((len(order) + first, count, row, int(counts[row])))
        order += tokens
    return (
        tuple(long),
        np.array(tiles, dtype=np.int32).reshape(-1, 4),
        np.array(order, dtype=np.int32),
    )
