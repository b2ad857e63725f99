"""The LoRA gather op for CUDA devices: `lora.cu` for decode, torch's matrix products for prefill.

Two launches a group do all tiles of a step. A segment of `MATMUL_TOKENS` and more is left to torch's
products, which run on tensor cores.
"""

import torch
from torch.nn.functional import pad

from polyloom.adapters.base_layout import GroupShape, ModuleGroup
from polyloom.adapters.config import PAGE_RANKS
from polyloom.adapters.group_pool import GroupPool
from polyloom.adapters.kernels.cuda_launch import padded, up
from polyloom.adapters.kernels.cuda_plan import LoraPlan, plan_group
from polyloom.adapters.segments import LoraBatch


class CudaLoraOp:
    """A layer of a page is A `[slices, 8, in]` with `in` padded to 8, then B `[out, 8]`."""

    name = "cuda"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._batch: LoraBatch | None = None
        self._plans: dict[ModuleGroup, LoraPlan] = {}

    def layer_elements(self, shape: GroupShape) -> int:
        elements = (
            len(shape.slices) * PAGE_RANKS * padded(shape.in_features)
            + shape.out_features * PAGE_RANKS
        )
        return up(elements, 64)

    def pack(self, shape: GroupShape, a: torch.Tensor, b: torch.Tensor, into: torch.Tensor) -> None:
        wide = pad(a, (0, padded(shape.in_features) - shape.in_features))
        packed = torch.cat((wide.flatten(), b.T.flatten())).to(into.dtype)
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
    size_a = len(shape.slices) * PAGE_RANKS * padded(shape.in_features)
    a = torch.stack([page[:size_a].view(len(shape.slices), PAGE_RANKS, -1) for page in packed], 1)
    b = torch.cat(
        [page[size_a:][: shape.out_features * PAGE_RANKS].view(-1, 8) for page in packed], 1
    )
    for index, part in enumerate(shape.slices):
        shrunk = x @ a[index].flatten(0, 1)[:, : shape.in_features].T
        columns = slice(part.offset, part.offset + part.out_features)
        y[:, columns].addmm_(shrunk, b[columns].T)
