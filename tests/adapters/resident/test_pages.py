"""What a revision takes of the budget, all or nothing, and that it all comes back."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from polyloom.adapters.base_layout import BaseLayout, ModuleGroup
from polyloom.adapters.errors import AdapterTooLargeError, CorruptAdapterError
from polyloom.adapters.kernels.reference import ReferenceLoraOp
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.weights import AdapterWeights

Make = Callable[..., AdapterWeights]
Pages = Callable[..., AdapterPages]


@pytest.fixture
def make_pages(layout: BaseLayout, pool_config: Callable[..., Any]) -> Pages:
    return lambda **changes: AdapterPages(pool_config(**changes), layout, ReferenceLoraOp())


@pytest.mark.parametrize(("rank", "pages"), [(1, 1), (8, 1), (9, 2), (20, 3), (64, 8)])
def test_pages_follow_the_rank_of_each_group(
    rank: int, pages: int, make_pages: Pages, revision: Make
) -> None:
    pools = make_pages()
    need = pools.need(revision(0, rank, groups=(ModuleGroup.QKV, ModuleGroup.DOWN)))
    assert need.pages == {ModuleGroup.QKV: pages, ModuleGroup.DOWN: pages}
    assert need.rows == frozenset()
    page_bytes = pools.pools[ModuleGroup.QKV].page_bytes + pools.pools[ModuleGroup.DOWN].page_bytes
    assert need.num_bytes == pages * page_bytes


def test_an_attention_only_revision_may_fill_the_whole_budget(
    make_pages: Pages, revision: Make
) -> None:
    pools = make_pages(max_slots=300)
    need = pools.need(revision(0, 8, groups=(ModuleGroup.QKV,), slices=(0, 2)))
    taken = []
    while (allocation := pools.allocate(need)) is not None:
        taken.append(allocation)
    assert len(taken) == pools.pages_total()["qkv"] > 150
    assert pools.pages_free()["qkv"] == 0
    pools.check(taken)


def test_an_allocation_takes_all_or_nothing(make_pages: Pages, revision: Make) -> None:
    pools = make_pages(memory_bytes=600_000)
    small, large = pools.need(revision(0, 8)), pools.need(revision(1, 40))
    first = pools.allocate(large)
    assert first is not None
    free = pools.free_bytes
    assert pools.allocate(large) is None
    assert pools.free_bytes == free
    pools.check([first])
    second = pools.allocate(small)
    assert second is not None
    pools.check([first, second])


def test_slots_run_out_before_bytes(make_pages: Pages, revision: Make) -> None:
    pools = make_pages(max_slots=1)
    need = pools.need(revision(0, 8))
    first = pools.allocate(need)
    assert first is not None
    assert pools.allocate(need) is None
    pools.free(first)
    assert pools.allocate(need) is not None


def test_freed_pages_are_unreachable(make_pages: Pages, revision: Make) -> None:
    pools = make_pages()
    weights = revision(0, 20, gain=True)
    allocation = pools.allocate(pools.need(weights))
    assert allocation is not None
    pools.write(allocation, weights)
    pools.free(allocation)
    assert pools.free_bytes == pools.config.memory_bytes
    for pool in pools.pools.values():
        assert not pool.addresses.any() and not pool.masks.any() and not pool.row_addresses.any()
        assert all(page is None for page in pool.pages) and all(rows is None for rows in pool.rows)
        with pytest.raises(LookupError, match="holds nothing"):
            pool.page(0)


def test_a_new_allocation_starts_as_zeros(make_pages: Pages, revision: Make) -> None:
    """Nothing of a revision that was there before can act for the next one."""
    pools = make_pages()
    weights = revision(0, 20, gain=True, shift=True)
    first = pools.allocate(pools.need(weights))
    assert first is not None
    pools.write(first, weights)
    pools.free(first)
    second = pools.allocate(pools.need(weights))
    assert second is not None
    for group, ids in second.pages.items():
        pool = pools.pools[group]
        rows = pool.rows[second.slot]
        assert rows is not None and not rows.any()
        assert not any(pool.page(page_id).any() for page_id in ids)
        assert not pool.masks[list(ids)].any()


def test_what_can_never_fit_names_the_limit(make_pages: Pages, revision: Make) -> None:
    with pytest.raises(AdapterTooLargeError, match="max_rank of 16"):
        make_pages(max_rank=16).need(revision(0, 17))
    with pytest.raises(AdapterTooLargeError, match="the limit is 100000"):
        make_pages(memory_bytes=100_000).need(revision(0, 64))


def test_terms_that_do_not_fit_are_refused(make_pages: Pages, revision: Make) -> None:
    pools = make_pages()
    good = revision(0, 8, groups=(ModuleGroup.QKV,))
    term = good.terms[0]
    bad = {
        "two rank terms on one module": (*good.terms, term),
        "are not whole modules": (replace(term, offset=1),),
        "does not fit": (replace(term, a=torch.zeros(8, 71)),),
    }
    for message, terms in bad.items():
        weights = AdapterWeights("sha256:bad", terms, ())
        allocation = pools.allocate(pools.need(weights))
        assert allocation is not None
        with pytest.raises(CorruptAdapterError, match=message):
            pools.write(allocation, weights)
        pools.free(allocation)
    pools.check([])
