"""Whole decode steps of a random Llama on a device: throughput over mixes of adapters, the price of
adapters against their bytes, the host's share, and a cold adapter's first token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.gpu_model import ServedModel, Sizes
from benchmarks.gpu_report import Clock, Report
from polyloom.adapters.placement import Allocation

MIXED_RANKS = (*[8] * 12, *[16] * 3, 64)
PROMPT = 128


@dataclass(frozen=True)
class Population:
    """Resident adapters. rank: None for `MIXED_RANKS` in turn."""

    adapters: int
    rank: int | None
    only_qv: bool = False

    def __str__(self) -> str:
        if not self.adapters:
            return "no adapter"
        modules = " on q, v" if self.only_qv else ""
        return f"{self.adapters} adapters, rank {self.rank or 'mixed'}{modules}"

    def ranks(self) -> list[int]:
        turns = [MIXED_RANKS[i % len(MIXED_RANKS)] for i in range(self.adapters)]
        return turns if self.rank is None else [self.rank] * self.adapters


def populations(sizes: Sizes) -> Iterator[Population]:
    """None; few of each rank; many, of which those of rank 64 would not fit; most on q and v."""
    yield Population(0, 8)
    *usual, most = sizes.populations
    for adapters in usual:
        yield Population(adapters, 8)
        if adapters <= 64:
            yield Population(adapters, 64)
        if adapters > 1:
            yield Population(adapters, None)
    yield Population(most, 8, only_qv=True)


def points(sizes: Sizes) -> Iterator[tuple[Population, int, str]]:
    """(resident adapters, batch, mix of them in the batch), at most 60."""
    for population in populations(sizes):
        for batch in sizes.batches:
            if population.adapters == 0:
                yield population, batch, "base"
            elif population.adapters == 1:
                yield population, batch, "identical"
            elif population.only_qv or population.adapters <= batch:
                yield population, batch, "zipf"
                if population.adapters >= batch:
                    yield population, batch, "distinct"


def time_points(report: Report, clock: Clock, model: ServedModel) -> None:
    """Tokens a second of decode steps, eager and by graphs."""
    held: list[Allocation] = []
    resident = None
    for population, batch, mix in points(model.sizes):
        name = f"decode, batch {batch}, {population}, {mix}"
        if clock.over:
            report.skipped.append(name)
            continue
        if population != resident:
            _free(model, held)
            held = [model.adapter(r, only_qv=population.only_qv) for r in population.ranks()]
            resident = population
        step, lora = model.step(batch), model.segments(chosen(held, batch, mix))
        for graphs in (False, True):
            taken = clock.seconds(partial(model.forward, step, lora, graphs=graphs))
            report.add(f"{name}{', graph' if graphs else ''}", batch / taken, "tok/s")
    _free(model, held)


def chosen(held: Sequence[Allocation], batch: int, mix: str) -> list[Allocation | None]:
    """Whose token each of the batch is; those of one adapter are neighbours."""
    if not held:
        return [None] * batch
    if mix == "zipf":
        shares = 1 / np.arange(1, len(held) + 1)
        drawn = np.random.default_rng(0).choice(len(held), batch, p=shares / shares.sum())
        return [held[i] for i in sorted(drawn)]
    return [held[i * len(held) // batch] if len(held) < batch else held[i] for i in range(batch)]


def time_adapters(report: Report, clock: Clock, model: ServedModel) -> None:
    """What 64 adapters of rank 16 add to a step, against reading their pages once."""
    batch = model.sizes.max_batch
    for only_qv in (True, False):
        held = [model.adapter(16, only_qv=only_qv) for _ in range(batch)]
        floor = batch * model.adapter_bytes(16, only_qv=only_qv) / report.bandwidth
        for context in sorted({min(1024, model.sizes.context), model.sizes.context}):
            step = model.step(batch, context)
            without, beside = (
                clock.seconds(partial(model.forward, step, model.segments(whose), graphs=True))
                for whose in ([None] * batch, held)
            )
            name = f"{batch} × rank 16, {'q, v' if only_qv else 'all linear'}, {context} tokens"
            ratio = (beside - without) / floor
            report.add(f"adapters add to a step, {name}", (beside - without) * 1e3, "ms")
            met = clock.verdict(ratio <= 1.25)
            report.bar(f"… over their bytes, {name}", ratio, "×", "≤ 1.25 ×", met)
        _free(model, held)


def time_graphs(report: Report, clock: Clock, model: ServedModel) -> None:
    """The host's share of a step."""
    batch = min(16, model.sizes.max_batch)
    adapter = model.adapter(16)
    step, lora = model.step(batch), model.segments([adapter] * batch)
    eager, replayed = (
        clock.host_seconds(partial(model.forward, step, lora, graphs=graphs))
        for graphs in (False, True)
    )
    report.add("host time of a step, eager", eager * 1e3, "ms")
    report.add("host time of a step, graph", replayed * 1e3, "ms")
    ratio = eager / replayed
    report.bar("… eager over graph", ratio, "×", "≥ 3 ×", clock.verdict(ratio >= 3))
    _free(model, [adapter])


def time_cold_adapter(report: Report, clock: Clock, model: ServedModel) -> None:
    """A revision of rank 16 from host memory to the first token after a prompt."""
    tokens = min(PROMPT, model.sizes.context)
    prompt, resident = model.prompt(tokens), model.adapter(16)
    on_host = [page.cpu() for page in _pages(model, resident)]

    def first_token(adapter: Allocation) -> None:
        model.forward(prompt, model.segments([adapter], tokens), graphs=False)
        clock.wait()

    def cold() -> None:
        adapter = model.adapter(16)
        for page, values in zip(_pages(model, adapter), on_host, strict=True):
            page.copy_(values)
        first_token(adapter)
        _free(model, [adapter])

    for name, work in (("resident", partial(first_token, resident)), ("cold", cold)):
        what = f"first token after {tokens}, {name} adapter"
        report.add(what, clock.seconds(work) * 1e3, "ms")
    _free(model, [resident])


def _pages(model: ServedModel, adapter: Allocation) -> list[torch.Tensor]:
    pools = model.pages.pools
    return [pools[group].page(i) for group, ids in adapter.pages.items() for i in ids]


def _free(model: ServedModel, held: Sequence[Allocation]) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # nothing may still read them
    for adapter in held:
        model.pages.free(adapter)
