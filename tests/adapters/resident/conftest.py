"""A small base in odd sizes, random revisions of it, and workers that run when a test says so."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import pytest
import torch

from polyloom.adapters.base_layout import BaseLayout, GroupShape, ModuleGroup, ModuleSlice
from polyloom.adapters.config import AdapterPoolConfig
from polyloom.adapters.weights import AdapterWeights, LoraTerm, RowTerm

LAYERS = 2
WIDTHS: dict[ModuleGroup, tuple[int, tuple[int, ...]]] = {
    ModuleGroup.QKV: (72, (80, 24, 40)),
    ModuleGroup.OUT: (80, (72,)),
    ModuleGroup.GATE_UP: (72, (144, 144)),
    ModuleGroup.DOWN: (144, (72,)),
    ModuleGroup.HEAD: (72, (300,)),
}

Result = TypeVar("Result")


def _shape(group: ModuleGroup) -> GroupShape:
    width, sizes = WIDTHS[group]
    slices = tuple(
        ModuleSlice(f"{group}.{index}", sum(sizes[:index]), size)
        for index, size in enumerate(sizes)
    )
    return GroupShape(group, 1 if group is ModuleGroup.HEAD else LAYERS, width, slices)


@pytest.fixture(scope="session")
def layout() -> BaseLayout:
    """Widths that no vector length divides."""
    return BaseLayout(
        name="odd",
        digest="sha256:0",
        architecture="OddForCausalLM",
        model_type="odd",
        num_layers=LAYERS,
        hidden_size=72,
        vocab_size=300,
        tied_head=False,
        layer_prefix="model.layers",
        groups=tuple(_shape(group) for group in WIDTHS),
        modules=(),
    )


class RevisionMaker:
    """Random revisions; every term is drawn from a generator seeded by the digest's number."""

    def __init__(self, layout: BaseLayout) -> None:
        self._layout = layout

    def __call__(
        self,
        number: int,
        rank: int,
        *,
        groups: Sequence[ModuleGroup] = tuple(ModuleGroup),
        slices: Sequence[int] = (0, 1, 2),
        layers: Sequence[int] = tuple(range(LAYERS)),
        gain: bool = False,
        shift: bool = False,
        fused: bool = False,
    ) -> AdapterWeights:
        """fused: one term over all slices of a group, as checkpoints with fused linears have."""
        random = torch.Generator().manual_seed(number)
        terms: list[LoraTerm] = []
        rows: list[RowTerm] = []
        for shape in self._layout.groups:
            if shape.group not in groups:
                continue
            parts = [(p.offset, p.out_features) for i, p in enumerate(shape.slices) if i in slices]
            if fused:
                parts = [(0, shape.out_features)]
            for layer in set(layers) & set(range(shape.layers)):
                for offset, out in parts:
                    a = torch.randn(rank, shape.in_features, generator=random)
                    b = torch.randn(out, rank, generator=random) / rank**0.5
                    terms.append(
                        LoraTerm(shape.group, layer, offset, a / shape.in_features**0.5, b)
                    )
                    if gain or shift:
                        vectors = torch.rand(2, out, generator=random) + 0.5
                        rows.append(
                            RowTerm(
                                shape.group,
                                layer,
                                offset,
                                vectors[0] if gain else None,
                                vectors[1] if shift else None,
                            )
                        )
        return AdapterWeights(f"sha256:{number}", tuple(terms), tuple(rows))


@pytest.fixture(scope="session")
def revision(layout: BaseLayout) -> RevisionMaker:
    return RevisionMaker(layout)


@pytest.fixture
def pool_config() -> Callable[..., AdapterPoolConfig]:
    """Pools of 4 MiB and 8 slots, unless a test says otherwise."""

    def make(**changes: Any) -> AdapterPoolConfig:
        values: dict[str, Any] = {
            "memory_bytes": 4 << 20,
            "max_slots": 8,
            "max_rank": 64,
            "dtype": torch.float32,
            "device": torch.device("cpu"),
        }
        return AdapterPoolConfig(**(values | changes))

    return make


class ManualWorkers(Executor):
    """Jobs wait until `run_one` or `run_all`; so a test decides what has finished when."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(  # type: ignore[override]
        self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any
    ) -> "Future[Result]":
        future: Future[Result] = Future()
        self.jobs.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run_one(self, index: int = 0) -> None:
        future, job = self.jobs.pop(index)
        try:
            future.set_result(job())
        except Exception as error:  # noqa: BLE001 (what an executor does)
            future.set_exception(error)


@pytest.fixture
def workers() -> ManualWorkers:
    return ManualWorkers()


@pytest.fixture(scope="session")
def workers_type() -> type[ManualWorkers]:
    """For state machines, which cannot take fixtures of a test's scope."""
    return ManualWorkers
