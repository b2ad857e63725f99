"""Random mixes of revisions on one group, and what the equation makes of them in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from polyloom.adapters.base_layout import BaseLayout, GroupShape, ModuleGroup, ModuleSlice
from polyloom.adapters.config import PAGE_RANKS, AdapterPoolConfig
from polyloom.adapters.group_pool import GroupPool
from polyloom.adapters.kernels.contract import LoraOp
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.placement import Allocation
from polyloom.adapters.segments import LoraBatch, lora_batch
from polyloom.adapters.weights import AdapterWeights, LoraTerm, RowTerm
from tests.cuda_emulator.emulator import guarded

Segments = Sequence[tuple[int | None, int]]
"""(index of the revision or None, tokens) of each segment."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class LoraShape:
    """One group: its input and the outputs of its slices."""

    inputs: int
    outputs: tuple[int, ...]
    layers: int = 1

    @property
    def group(self) -> GroupShape:
        slices = tuple(
            ModuleSlice(str(i), sum(self.outputs[:i]), n) for i, n in enumerate(self.outputs)
        )
        return GroupShape(ModuleGroup.QKV, self.layers, self.inputs, slices)


class LoraCase:
    """Revisions of given ranks, resident for `op`; with_rows gives every second one row vectors."""

    def __init__(
        self,
        op: LoraOp,
        shape: LoraShape,
        ranks: Sequence[int],
        dtype: torch.dtype,
        *,
        with_rows: bool = False,
        seed: int = 0,
        device: torch.device = CPU,
    ) -> None:
        self.shape, self.ranks, self.dtype, self.device = shape, tuple(ranks), dtype, device
        self.random = torch.Generator().manual_seed(seed)
        self.op = op
        config = AdapterPoolConfig(1 << 30, max(len(ranks), 1), max([*ranks, 1]), dtype, device)
        self.pages = AdapterPages(config, cast(BaseLayout, _OneGroup((shape.group,))), op)
        self.revisions = [self._revision(i, with_rows and i % 2 == 0) for i in range(len(ranks))]
        self.allocations = [self._place(weights) for weights in self.revisions]

    @property
    def pool(self) -> GroupPool:
        return self.pages.pools[ModuleGroup.QKV]

    def batch(self, segments: Segments) -> LoraBatch:
        return lora_batch([(None if i is None else self.allocations[i], n) for i, n in segments])

    def activations(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [tokens, in], y [tokens, out], bias [out]."""
        sizes = (
            (tokens, self.shape.inputs),
            (tokens, sum(self.shape.outputs)),
            (1, sum(self.shape.outputs)),
        )
        x, y, bias = (torch.randn(s, generator=self.random).to(self.dtype) for s in sizes)
        return x, y, bias[0]

    def expected(
        self, segments: Segments, layer: int, x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """The equation in float64 over the values that are stored."""
        result, x, bias = y.double(), x.double(), bias.double()
        start = 0
        for index, count in segments:
            own = slice(start, start + count)
            start += count
            if index is None:
                continue
            for row in self.revisions[index].rows:
                if row.layer == layer and row.gain is not None and row.shift is not None:
                    at = slice(row.offset, row.offset + len(row.gain))
                    shifted = row.gain.double() * (result[own, at] - bias[at])
                    result[own, at] = shifted + bias[at] + row.shift.double()
            for term in self.revisions[index].terms:
                if term.layer == layer:
                    at = slice(term.offset, term.offset + term.b.shape[0])
                    a, b = (w.to(self.dtype).double() for w in (term.a, term.b))
                    result[own, at] += x[own] @ a.T @ b.T
        return result

    def error(self, segments: Segments, *, bias: bool = True) -> float:
        """Largest relative Frobenius error over the layers; untouched tokens must be untouched."""
        worst = 0.0
        for layer in range(self.shape.layers):
            x, y, added = self.activations(sum(count for _, count in segments))
            added = added if bias else torch.zeros_like(added)
            expected = self.expected(segments, layer, x, y, added)
            given, actual = (self._there(tensor) for tensor in (x, y))
            there = self._there(added) if bias else None
            self.op.apply(self.pool, layer, given, actual, self.batch(segments), there)
            actual = actual.cpu()
            self._check_base(segments, y, actual)
            worst = max(worst, relative(actual, expected))
        return worst

    def pages_read(self, segments: Segments, tile: int = 16) -> int:
        """Pages of the revisions, each once every `tile` tokens of its revision."""
        return sum(
            -(-count // tile) * -(-self.ranks[i] // PAGE_RANKS)
            for i, count in _tokens(segments).items()
        )

    def unavoidable_bytes(self, segments: Segments) -> int:
        """What any way must load: `pages_read`, and activations once."""
        shape = self.shape
        page = PAGE_RANKS * (len(shape.outputs) * shape.inputs + sum(shape.outputs))
        tokens = sum(_tokens(segments).values())
        activations = tokens * (shape.inputs + sum(shape.outputs))
        return (self.pages_read(segments) * page + activations) * self.dtype.itemsize

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        return guarded(tensor) if self.device.type == "cpu" else tensor.to(self.device)

    def _check_base(self, segments: Segments, before: torch.Tensor, after: torch.Tensor) -> None:
        start = 0
        for index, count in segments:
            if index is None and not torch.equal(before[start:][:count], after[start:][:count]):
                raise AssertionError(f"tokens from {start} have no adapter and were changed")
            start += count

    def _revision(self, index: int, rows: bool) -> AdapterWeights:
        rank, terms, vectors = self.ranks[index], [], []
        for layer in range(self.shape.layers):
            for part in self.shape.group.slices:
                a = torch.randn(rank, self.shape.inputs, generator=self.random)
                b = torch.randn(part.out_features, rank, generator=self.random)
                terms.append(
                    LoraTerm(
                        ModuleGroup.QKV, layer, part.offset,
                        a / self.shape.inputs**0.5, b / rank**0.5,
                    )
                )  # fmt: skip
                if rows:
                    gain, shift = torch.rand(2, part.out_features, generator=self.random) + 0.5
                    vectors.append(RowTerm(ModuleGroup.QKV, layer, part.offset, gain, shift))
        return AdapterWeights(f"sha256:{index}", tuple(terms), tuple(vectors))

    def _place(self, weights: AdapterWeights) -> Allocation:
        """Pages full of NaN before they are written: what is not written must not be read."""
        allocation = self.pages.allocate(self.pages.need(weights))
        assert allocation is not None
        for page_id in allocation.pages.get(ModuleGroup.QKV, ()):
            self.pool.page(page_id).fill_(float("nan"))
        self.pages.write(allocation, weights)
        return allocation


@dataclass(frozen=True)
class _OneGroup:
    """As much of a `BaseLayout` as the pools read."""

    groups: tuple[GroupShape, ...]


def _tokens(segments: Segments) -> dict[int, int]:
    """Of each revision."""
    tokens: dict[int, int] = {}
    for index, count in segments:
        if index is not None:
            tokens[index] = tokens.get(index, 0) + count
    return tokens


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual − expected‖ / ‖expected‖ in float64; infinite if anything is not a number."""
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    return float(difference) if bool(difference.isfinite()) else float("inf")
