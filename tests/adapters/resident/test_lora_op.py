"""Every implementation of the gather op against the equation, token by token, in fp64."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from polyloom.adapters.base_layout import BaseLayout, ModuleGroup
from polyloom.adapters.kernels.choice import LoraChoice, choose_lora_op
from polyloom.adapters.kernels.contract import LoraOp
from polyloom.adapters.kernels.cpu import CpuLoraOp, load_cpu_lora
from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.adapters.kernels.reference import ReferenceLoraOp
from polyloom.adapters.layers import LoraLayers
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.placement import Allocation
from polyloom.adapters.segments import LoraBatch, lora_batch
from polyloom.adapters.weights import AdapterWeights
from polyloom.kvcache.kernels.dispatch import Capabilities
from tests.cuda_emulator.backend import EmulatedDevice

RANKS = (1, 3, 8, 12, 16, 20, 33, 64)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

# (index of the revision or None, tokens), by the kind of mix that serving meets.
MIXES: dict[str, list[tuple[int | None, int]]] = {
    "identical": [(4, 1)] * 9,
    "distinct": [(index, 1) for index in range(8)],
    "uniform": [(index % 4, 3) for index in range(12)],
    "zipf": [(0, 24), (1, 12), (2, 8), (3, 6), (4, 5), (5, 4), (6, 3), (7, 3)],
    "skewed": [(7, 133), (None, 40), (0, 1), (None, 1), (3, 1), (1, 7), (2, 16), (5, 17)],
    "base among all": [(None, 2), (7, 1), (None, 1), (6, 64), (None, 3)],
}


@pytest.fixture(
    params=[
        "reference-fp32", "reference-bf16", "cpu-fp32", "cpu-bf16", "cuda-fp32", "cuda-bf16"
    ]
)  # fmt: skip
def op_and_dtype(
    request: pytest.FixtureRequest, emulated_device: EmulatedDevice
) -> tuple[LoraOp, torch.dtype]:
    name, precision = request.param.split("-")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    if name == "reference":
        return ReferenceLoraOp(), dtype
    if name == "cuda":
        return CudaLoraOp(dtype), dtype
    assert load_cpu_lora(dtype) is None
    return CpuLoraOp(dtype), dtype


def oracle(
    revisions: Sequence[AdapterWeights],
    segments: Sequence[tuple[int | None, int]],
    group: ModuleGroup,
    layer: int,
    x: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """What y must become, fp64, from the terms themselves."""
    result, x = y.double(), x.double()
    zeros = torch.zeros(y.shape[1]).double()
    base_bias = zeros if bias is None else bias.double()
    start = 0
    for index, count in segments:
        end = start + count
        if index is not None:
            here = [t for t in revisions[index].terms if (t.group, t.layer) == (group, layer)]
            rows = [t for t in revisions[index].rows if (t.group, t.layer) == (group, layer)]
            for row in rows:
                for vector, form in ((row.gain, "gain"), (row.shift, "shift")):
                    if vector is None:
                        continue
                    at = slice(row.offset, row.offset + len(vector))
                    if form == "gain":
                        product = result[start:end, at] - base_bias[at]
                        result[start:end, at] = vector.double() * product + base_bias[at]
                    else:
                        result[start:end, at] += vector.double()
            for term in here:
                at = slice(term.offset, term.offset + term.b.shape[0])
                result[start:end, at] += x[start:end] @ term.a.double().T @ term.b.double().T
        start = end
    return result


class Placed:
    """Revisions in pages, and what the op makes of a mix of them."""

    def __init__(
        self,
        op: LoraOp,
        pages: AdapterPages,
        revisions: Sequence[AdapterWeights],
    ) -> None:
        self.op = op
        self.pages = pages
        self.revisions = revisions
        self.allocations: list[Allocation] = []
        for weights in revisions:
            allocation = pages.allocate(pages.need(weights))
            assert allocation is not None
            pages.write(allocation, weights)
            self.allocations.append(allocation)

    def batch(self, segments: Sequence[tuple[int | None, int]]) -> LoraBatch:
        return lora_batch(
            [(None if i is None else self.allocations[i], count) for i, count in segments]
        )

    def largest_error(
        self,
        segments: Sequence[tuple[int | None, int]],
        group: ModuleGroup,
        layer: int,
        *,
        with_bias: bool,
    ) -> float:
        """Of one call on random activations, relative to the largest value."""
        shape = self.pages.pools[group].shape
        dtype = self.pages.config.dtype
        random = torch.Generator().manual_seed(layer)
        tokens = sum(count for _, count in segments)
        x = torch.randn(tokens, shape.in_features, generator=random).to(dtype)
        y = torch.randn(tokens, shape.out_features, generator=random).to(dtype)
        bias = torch.randn(shape.out_features, generator=random).to(dtype) if with_bias else None
        expected = oracle(self.revisions, segments, group, layer, x, y, bias)
        before = y.clone()
        layers = LoraLayers(self.pages, LoraChoice(self.op), Capabilities())
        layers.apply(group, layer, x, y, self.batch(segments), bias)
        self._base_untouched(segments, before, y)
        return float((y.double() - expected).abs().max() / expected.abs().max())

    def _base_untouched(
        self, segments: Sequence[tuple[int | None, int]], before: torch.Tensor, after: torch.Tensor
    ) -> None:
        start = 0
        for index, count in segments:
            if index is None:
                assert torch.equal(before[start : start + count], after[start : start + count])
            start += count


Place = Callable[..., Placed]


@pytest.fixture
def place(
    op_and_dtype: tuple[LoraOp, torch.dtype], layout: BaseLayout, pool_config: Callable[..., Any]
) -> Place:
    def make(revisions: Sequence[AdapterWeights]) -> Placed:
        op, dtype = op_and_dtype
        config = pool_config(dtype=dtype, max_slots=max(len(revisions), 1), memory_bytes=64 << 20)
        return Placed(op, AdapterPages(config, layout, op), revisions)

    return make


def every_error(placed: Placed, segments: Sequence[tuple[int | None, int]]) -> float:
    return max(
        placed.largest_error(segments, group, layer, with_bias=with_bias)
        for group, pool in placed.pages.pools.items()
        for layer in range(pool.shape.layers)
        for with_bias in (False, True)
    )


@pytest.mark.parametrize("mix", MIXES)
def test_mixes_of_all_ranks(
    mix: str, place: Place, revision: Callable[..., AdapterWeights]
) -> None:
    placed = place([revision(index, rank) for index, rank in enumerate(RANKS)])
    assert every_error(placed, MIXES[mix]) < TOLERANCE[placed.pages.config.dtype]


@pytest.mark.parametrize("mix", ["distinct", "skewed"])
def test_partial_and_weight_decomposed_revisions(
    mix: str, place: Place, revision: Callable[..., AdapterWeights]
) -> None:
    qkv, head = ModuleGroup.QKV, ModuleGroup.HEAD
    placed = place(
        [
            revision(0, 8, groups=(qkv,), slices=(0, 2)),
            revision(1, 12, gain=True),
            revision(2, 16, shift=True),
            revision(3, 5, gain=True, shift=True, groups=(qkv, head)),
            revision(4, 20, groups=(head,)),
            revision(5, 9, layers=(1,)),
            revision(6, 11, fused=True),
            revision(7, 64, slices=(1,), gain=True),
        ]
    )
    assert every_error(placed, MIXES[mix]) < TOLERANCE[placed.pages.config.dtype]


def test_what_a_revision_does_not_touch_is_not_read(
    place: Place, revision: Callable[..., AdapterWeights]
) -> None:
    """Pages are full of NaN but for the one layer that the revision adapts."""
    placed = place([])
    weights = revision(0, 20, layers=(1,), groups=(ModuleGroup.QKV, ModuleGroup.DOWN))
    allocation = placed.pages.allocate(placed.pages.need(weights))
    assert allocation is not None
    for group, ids in allocation.pages.items():
        for page_id in ids:
            placed.pages.pools[group].page(page_id).fill_(float("nan"))
    placed.pages.write(allocation, weights)
    placed.revisions, placed.allocations = [weights], [allocation]
    assert every_error(placed, [(0, 1), (None, 1), (0, 20)]) < TOLERANCE[placed.pages.config.dtype]


def test_slices_of_different_ranks(place: Place, revision: Callable[..., AdapterWeights]) -> None:
    wide = revision(0, 24, slices=(0,))
    narrow = revision(1, 3, slices=(2,), gain=True)
    both = AdapterWeights("sha256:both", wide.terms + narrow.terms, narrow.rows)
    placed = place([both])
    assert every_error(placed, [(0, 1), (None, 2), (0, 30)]) < TOLERANCE[placed.pages.config.dtype]


def test_no_adapter_is_not_the_last_slot(
    place: Place, revision: Callable[..., AdapterWeights]
) -> None:
    """All slots are taken, so an index of -1 would find weights."""
    placed = place([revision(index, 8, gain=True, shift=True) for index in range(8)])
    assert placed.pages.free_slots == 0
    batch = placed.batch([(None, 3), (7, 1), (None, 4)])
    assert batch.slots.tolist() == [-1, placed.allocations[7].slot, -1]
    assert every_error(placed, [(None, 3), (7, 1), (None, 4)]) < 2e-2


def test_a_batch_of_the_base_alone_is_empty(
    place: Place, revision: Callable[..., AdapterWeights]
) -> None:
    placed = place([revision(0, 8)])
    assert placed.batch([(None, 5), (None, 1)]).empty
    assert not placed.batch([(None, 5), (0, 1)]).empty


def test_neighbours_of_one_revision_are_one_segment(
    place: Place, revision: Callable[..., AdapterWeights]
) -> None:
    placed = place([revision(0, 8), revision(1, 8)])
    batch = placed.batch([(0, 1), (0, 4), (1, 1), (0, 1), (None, 1), (None, 1)])
    assert batch.starts.tolist() == [0, 5, 6, 7, 9]


def test_a_row_strided_output(place: Place, revision: Callable[..., AdapterWeights]) -> None:
    """The op writes into a view, and only there."""
    placed = place([revision(0, 12)])
    dtype = placed.pages.config.dtype
    wide = torch.zeros(9, 100, dtype=dtype)
    y, x = wide[:, 10:82], torch.randn(9, 80, generator=torch.Generator().manual_seed(0)).to(dtype)
    batch = placed.batch([(0, 9)])
    placed.op.apply(placed.pages.pools[ModuleGroup.OUT], 0, x, y, batch, None)
    expected = oracle(placed.revisions, [(0, 9)], ModuleGroup.OUT, 0, x, y * 0, None)
    error = (y.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype]
    assert not wide[:, :10].any() and not wide[:, 82:].any()


def test_only_long_bfloat16_segments_run_on_tiles(
    layout: BaseLayout, pool_config: Callable[..., Any], revision: Callable[..., AdapterWeights]
) -> None:
    has_tiles = torch.cpu._is_amx_tile_supported()
    for dtype, expected in ((torch.float32, 0), (torch.bfloat16, int(has_tiles))):
        assert load_cpu_lora(dtype) is None
        op = CpuLoraOp(dtype)
        pages = AdapterPages(pool_config(dtype=dtype), layout, op)
        placed = Placed(op, pages, [revision(0, 8), revision(1, 8)])
        capabilities = Capabilities()
        layers = LoraLayers(pages, LoraChoice(op), capabilities)
        x, y = torch.ones(64, 80, dtype=dtype), torch.zeros(64, 72, dtype=dtype)
        layers.apply(ModuleGroup.OUT, 0, x, y, placed.batch([(0, 62), (1, 2)]))
        calls, tiles = capabilities.ledgers()
        assert (calls.name, calls.implementation, calls.engaged) == ("lora", "cpu", 1)
        assert (tiles.name, tiles.engaged) == ("lora_tiles", expected)


@pytest.mark.parametrize(
    ("x_shape", "y_shape", "named"),
    [
        ((4, 72), (4, 100), "y must be"),
        ((5, 72), (4, 144), "y must be"),
        ((4,), (4, 144), "x must"),
    ],
)
def test_wrong_shapes_are_named(
    x_shape: tuple[int, ...],
    y_shape: tuple[int, ...],
    named: str,
    layout: BaseLayout,
    pool_config: Callable[..., Any],
    revision: Callable[..., AdapterWeights],
) -> None:
    assert load_cpu_lora(torch.float32) is None
    op = CpuLoraOp(torch.float32)
    placed = Placed(op, AdapterPages(pool_config(), layout, op), [revision(0, 8)])
    pool = placed.pages.pools[ModuleGroup.QKV]
    with pytest.raises(RuntimeError, match=named):
        op.apply(pool, 0, torch.zeros(x_shape), torch.zeros(y_shape), placed.batch([(0, 4)]), None)


def test_a_machine_without_a_compiler_runs_the_reference(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    layout: BaseLayout,
    pool_config: Callable[..., Any],
    revision: Callable[..., AdapterWeights],
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    monkeypatch.setenv("HOME", str(tmp_path))  # where nothing was built before
    choice = choose_lora_op(torch.float32, torch.device("cpu"))
    assert choice.op.name == "reference"
    assert "no C++ compiler" in str(choice.fallback_reason)
    placed = Placed(choice.op, AdapterPages(pool_config(), layout, choice.op), [revision(0, 8)])
    capabilities = Capabilities()
    layers = LoraLayers(placed.pages, choice, capabilities)
    batch = placed.batch([(0, 1)])
    layers.apply(ModuleGroup.OUT, 0, torch.ones(1, 80), torch.zeros(1, 72), batch)
    calls, _ = capabilities.ledgers()
    assert calls.fallbacks == {choice.fallback_reason: 1}


def test_a_dtype_without_an_op_says_so() -> None:
    choice = choose_lora_op(torch.float16, torch.device("cpu"))
    assert choice.op.name == "reference" and "float16" in str(choice.fallback_reason)
