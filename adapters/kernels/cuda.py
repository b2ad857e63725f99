"""The LoRA gather op for CUDA devices: `lora.cu` for decode, torch's matrix products for prefill.

Tokens of one revision are gathered from wherever they lie in the batch into tiles of up to 16, so
its pages are read once a tile; two launches a group do all tiles of a step. A segment of
`MATMUL_TOKENS` and more is left to torch's products, which run on tensor cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from polyloom.adapters.base_layout import GroupShape, ModuleGroup
from polyloom.adapters.config import PAGE_RANKS
from polyloom.adapters.group_pool import GroupPool
from polyloom.adapters.segments import LoraBatch
from polyloom.kvcache.kernels.cuda import SCALAR_TYPES, cuda_kernels
from polyloom.kvcache.kernels.device_arrays import filled, to_device

SOURCE = Path(__file__).with_name("lora.cu")
MATMUL_TOKENS = 64
TILE = 16
_SPAN = 512
_EXPAND_THREADS = 256
_WANTED_BLOCKS = 1024
_MAX_SLICES = 3


def kernel_names(dtype: torch.dtype) -> tuple[str, ...]:
    """Instantiations for pools of `dtype`."""
    scalar = SCALAR_TYPES[dtype]
    return (f"lora_shrink<{scalar}>", f"lora_expand<{scalar}>")


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


class CudaLoraOp:
    """A layer of a page is A `[slices, 8, in]` with `in` padded to 8, then B `[out, 8]`."""

    name = "cuda"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._batch: LoraBatch | None = None
        self._plans: dict[ModuleGroup, LoraPlan] = {}

    def layer_elements(self, shape: GroupShape) -> int:
        elements = len(shape.slices) * PAGE_RANKS * _padded(shape) + shape.out_features * PAGE_RANKS
        return _up(elements, 64)

    def pack(self, shape: GroupShape, a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> None:
        padded = pad(a, (0, _padded(shape) - shape.in_features))
        packed = torch.cat((padded.flatten(), b.T.flatten())).to(into.dtype)
        into[: packed.numel()].copy_(packed)

    def apply(
        self,
        pool: GroupPool,
        layer: int,
        x: torch.Tensor,
        y: torch.Tensor,
        batch: LoraBatch,
        bias: torch.Tensor | None,
    ) -> int:
        plan = self._plan(pool, batch, x, y)
        for first, end, row in plan.matmul:
            _matmul(pool, layer, x[first:end], y[first:end], batch, row, bias)
        if len(plan.tiles):
            torch.ops.polyloom_cuda.lora(
                x,
                y,
                plan.partial,
                plan.tiles,
                plan.order,
                plan.pages,
                plan.masks[layer],
                plan.rows,
                bias,
                [part.offset for part in pool.shape.slices],
                layer,
            )
        return len(plan.matmul)

    def use(self, batch: LoraBatch, plans: dict[ModuleGroup, LoraPlan]) -> None:
        """Run `batch` by these plans: those of a graph's frame."""
        self._batch, self._plans = batch, plans

    def _plan(
        self, pool: GroupPool, batch: LoraBatch, x: torch.Tensor, y: torch.Tensor
    ) -> LoraPlan:
        """The group's part of a step, made at its first layer and kept for the others."""
        if self._batch is not batch:
            self._batch, self._plans = batch, {}
        plan = self._plans.get(pool.shape.group)
        if plan is None:
            self._check(pool.shape, x, y, int(batch.starts[-1]))
            plan = self._plans[pool.shape.group] = plan_group(pool, batch, x.device)
        return plan

    def _check(self, shape: GroupShape, x: torch.Tensor, y: torch.Tensor, tokens: int) -> None:
        for name, tensor, width in (("x", x, shape.in_features), ("y", y, shape.out_features)):
            if tensor.shape != (tokens, width):
                raise ValueError(
                    f"{name} must be [{tokens}, {width}] in {shape.group}, not {list(tensor.shape)}"
                )
            if tensor.dtype is not self._dtype or tensor.stride(-1) != 1:
                raise ValueError(f"{name} must be {self._dtype} with a contiguous last dimension")


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
    padded = [filled(array, size, 0) for array, size in zip(arrays, shapes, strict=True)]
    return LoraPlan(*_tensors(padded, device, frame.memory), frame.partial, ())


def _tensors(
    arrays: Sequence[NDArray[Any]], device: torch.device, into: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tiles, order, pages, masks, rows = to_device(arrays, device, into)
    return tiles, order, pages, masks, rows


def _partial(shape: GroupShape, tokens: int, width: int, device: torch.device) -> torch.Tensor:
    """Room for what `lora_shrink` writes: [splits, tokens, width * slices * 8] fp32."""
    ranks = width * len(shape.slices) * PAGE_RANKS
    splits = -(-_padded(shape) // _SPAN)
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


def _matmul(
    pool: GroupPool,
    layer: int,
    x: torch.Tensor,
    y: torch.Tensor,
    batch: LoraBatch,
    row: int,
    bias: torch.Tensor | None,
) -> None:
    """One segment by torch's products: x [n, in], y [n, out] changed in place."""
    shape, slot = pool.shape, int(batch.slots[row])
    vectors = pool.rows[slot]
    if vectors is not None:
        gain, shift = vectors[layer].unbind()
        base_bias = torch.zeros_like(shift) if bias is None else bias.float()
        y.copy_(gain * (y.float() - base_bias) + base_bias + shift)
    table = batch.pages.get(shape.group)
    ids = [] if table is None else [i for i in table[row].tolist() if i >= 0]
    packed = [pool.page(i)[layer] for i in ids if int(pool.masks[i, layer])]
    if not packed:
        return
    size_a = len(shape.slices) * PAGE_RANKS * _padded(shape)
    a = torch.stack([page[:size_a].view(len(shape.slices), PAGE_RANKS, -1) for page in packed], 1)
    b = torch.cat(
        [page[size_a:][: shape.out_features * PAGE_RANKS].view(-1, 8) for page in packed], 1
    )
    for index, part in enumerate(shape.slices):
        shrunk = x @ a[index].flatten(0, 1)[:, : shape.in_features].T
        columns = slice(part.offset, part.offset + part.out_features)
        y[:, columns].addmm_(shrunk, b[columns].T)


@torch.library.custom_op("polyloom_cuda::lora", mutates_args=("y", "partial"))
def _lora(
    x: torch.Tensor,
    y: torch.Tensor,
    partial: torch.Tensor,
    tiles: torch.Tensor,
    order: torch.Tensor,
    pages: torch.Tensor,
    masks: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    offsets: Sequence[int],
    layer: int,
) -> None:
    """Shrink and expand the tiles of a plan, in one layer of a group. offsets: of its slices."""
    kernels = cuda_kernels(SOURCE, kernel_names(x.dtype), x.device.type)
    scalar, slices = SCALAR_TYPES[x.dtype], len(offsets)
    inputs, outs, width = x.shape[1], y.shape[1], pages.shape[1]
    padded = _up(inputs, 8)
    size_a = slices * PAGE_RANKS * padded
    layer_bytes = _up(size_a + outs * PAGE_RANKS, 64) * x.element_size() * layer
    splits, tokens, ranks = partial.shape
    table_bytes = _up(width * 12, 16)
    kernels.launch(
        f"lora_shrink<{scalar}>",
        (len(tiles), splits),
        128,
        (
            partial,
            x,
            tiles,
            order,
            pages,
            masks,
            *map(np.int32, (tokens, width, slices, inputs, padded)),
            *map(np.int64, (x.stride(0), layer_bytes)),
        ),
        x.device,
        table_bytes,
    )
    edges = [*offsets[1:], outs, outs][:2]
    chunk = _outs_a_block(len(tiles), outs)
    kernels.launch(
        f"lora_expand<{scalar}>",
        (len(tiles), -(-outs // chunk)),
        _EXPAND_THREADS,
        (
            y,
            partial,
            tiles,
            order,
            pages,
            masks,
            rows,
            bias,
            *map(np.int32, (tokens, width, slices, *edges, outs, chunk, splits)),
            *map(
                np.int64,
                (y.stride(0), layer_bytes + size_a * x.element_size(), layer * 2 * outs * 4),
            ),
        ),
        x.device,
        table_bytes + TILE * ranks * 4,
    )


@_lora.register_fake
def _lora_fake(*_: object) -> None:
    """Changes y and partial, returns nothing."""


def _outs_a_block(tiles: int, outs: int) -> int:
    """Outputs that one block makes: many, since each block reads the shrunk values anew; fewer
    where there would be too few blocks to fill a device."""
    blocks = -(-_WANTED_BLOCKS // tiles)
    return min(4 * _EXPAND_THREADS, max(_EXPAND_THREADS, _up(outs // blocks, _EXPAND_THREADS)))


def _padded(shape: GroupShape) -> int:
    return _up(shape.in_features, 8)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
