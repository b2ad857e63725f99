"""Memory of resident revisions: rank pages by module group, under one byte budget.

A page holds 8 ranks of A and B for all layers of one group; a revision has as many pages in a group
as its rank there needs, and none in a group it does not touch. Pages of different groups differ in
size, so what is shared between groups is bytes, not frames: a revision's pages are one allocation
of exactly their bytes, taken whole or not at all, and returned whole. So a q/v-only adapter and a
head-only one use the same budget, nothing fragments, and memory in use is what the budget says.
"""

from collections import defaultdict
from typing import Protocol

import torch

from polyloom.adapters.base_layout import GroupShape, ModuleGroup
from polyloom.adapters.config import PAGE_RANKS, AdapterPoolConfig
from polyloom.adapters.device_memory import zeroed_bytes
from polyloom.adapters.errors import AdapterTooLargeError, CorruptAdapterError
from polyloom.adapters.group_pool import GroupPool
from polyloom.adapters.kernels.contract import LoraOp
from polyloom.adapters.placement import Allocation, PageNeed
from polyloom.adapters.weights import AdapterWeights, LoraTerm, RowTerm

_ALIGNMENT = 64


class PagedLinears(Protocol):
    """The fused linears that pages are made for: a base's, or a draft head's."""

    @property
    def groups(self) -> tuple[GroupShape, ...]: ...


class AdapterPages:
    """All pools of one engine. Owned by the step loop; only `write` may run on another thread."""

    def __init__(self, config: AdapterPoolConfig, layout: PagedLinears, op: LoraOp) -> None:
        self.config = config
        self.pools = {shape.group: self._pool(shape, op) for shape in layout.groups}
        self._op = op
        self._free_slots = list(range(config.max_slots - 1, -1, -1))
        self._used_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.config.memory_bytes - self._used_bytes

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def pages_free(self) -> dict[str, int]:
        """Pages that each group could still take if it alone took them."""
        return {group: self.free_bytes // pool.page_bytes for group, pool in self.pools.items()}

    def pages_total(self) -> dict[str, int]:
        """Pages that each group could take if it had the whole budget."""
        return {group: pool.capacity for group, pool in self.pools.items()}

    def need(self, weights: AdapterWeights) -> PageNeed:
        """What `weights` take; AdapterTooLargeError, naming the limit, if they can never fit."""
        config = self.config
        ranks = {group: weights.rank(group) for group in self.pools}
        rank = max(ranks.values())
        if rank > config.max_rank:
            raise AdapterTooLargeError(
                weights.digest, f"rank {rank} is over the limit max_rank of {config.max_rank}"
            )
        pages = {group: -(-rank // PAGE_RANKS) for group, rank in ranks.items() if rank}
        rows = frozenset(term.group for term in weights.rows)
        num_bytes = sum(self.pools[group].page_bytes * count for group, count in pages.items())
        num_bytes += sum(_aligned(self.pools[group].row_bytes) for group in rows)
        if num_bytes > config.memory_bytes:
            raise AdapterTooLargeError(
                weights.digest,
                f"needs {num_bytes} bytes of adapter memory, the limit is {config.memory_bytes}",
            )
        return PageNeed(pages, rows, num_bytes)

    def allocate(self, need: PageNeed) -> Allocation | None:
        """A slot and all that is needed, or None and nothing taken."""
        if need.num_bytes > self.free_bytes or not self._free_slots:
            return None
        memory = zeroed_bytes(max(need.num_bytes, _ALIGNMENT), self.config.device)
        self._used_bytes += need.num_bytes
        slot = self._free_slots.pop()
        ids: dict[ModuleGroup, tuple[int, ...]] = {}
        offset = 0
        for group, count in need.pages.items():
            pool = self.pools[group]
            end = offset + count * pool.page_bytes
            pages = memory[offset:end].view(self.config.dtype).view(count, pool.shape.layers, -1)
            ids[group] = tuple(pool.add_page(page) for page in pages)
            offset = end
        for group in sorted(need.rows):
            pool = self.pools[group]
            rows = memory[offset : offset + pool.row_bytes].view(torch.float32)
            pool.set_rows(slot, rows.view(pool.shape.layers, 2, pool.shape.out_features))
            offset += _aligned(pool.row_bytes)
        return Allocation(slot, need, ids)

    def free(self, allocation: Allocation) -> None:
        """Return everything; the memory goes back to the device."""
        for group, ids in allocation.pages.items():
            for page_id in ids:
                self.pools[group].remove_page(page_id)
        for group in allocation.need.rows:
            self.pools[group].remove_rows(allocation.slot)
        self._free_slots.append(allocation.slot)
        self._used_bytes -= allocation.need.num_bytes

    def write(self, allocation: Allocation, weights: AdapterWeights) -> None:
        """Fill an allocation that no batch refers to yet. May run on any thread.

        Raises CorruptAdapterError for terms that do not fit the base or overlap.
        """
        by_place: defaultdict[tuple[ModuleGroup, int], list[LoraTerm]] = defaultdict(list)
        for term in weights.terms:
            by_place[term.group, term.layer].append(term)
        for (group, layer), terms in by_place.items():
            pool = self.pools[group]
            for index, page_id in enumerate(allocation.pages[group]):
                page = _Page(pool.shape, weights.digest)
                for term in terms:
                    page.add(term, index * PAGE_RANKS)
                if page.mask:
                    self._op.pack(pool.shape, page.a, page.b, pool.page(page_id)[layer])
                    pool.masks[page_id, layer] = page.mask
        self._write_rows(allocation, weights.rows)

    def _write_rows(self, allocation: Allocation, terms: tuple[RowTerm, ...]) -> None:
        vectors = {group: self.pools[group].rows[allocation.slot] for group in allocation.need.rows}
        for rows in vectors.values():
            if rows is not None:
                rows[:, 0] = 1.0
        for term in terms:
            rows = vectors[term.group]
            if rows is None:
                raise LookupError(f"slot {allocation.slot} has no rows in {term.group}")
            for index, vector in enumerate((term.gain, term.shift)):
                if vector is not None:
                    rows[term.layer, index, term.offset : term.offset + len(vector)] = vector

    def check(self, allocations: list[Allocation]) -> None:
        """AssertionError unless `allocations` are exactly what is held; for idle checks and tests."""
        assert self._used_bytes == sum(a.need.num_bytes for a in allocations)
        slots = [a.slot for a in allocations] + self._free_slots
        assert sorted(slots) == list(range(self.config.max_slots))
        for group, pool in self.pools.items():
            ids = sorted(i for a in allocations for i in a.pages.get(group, ()))
            assert ids == [i for i, page in enumerate(pool.pages) if page is not None]
            assert ids == pool.addresses.nonzero().flatten().tolist()
            assert len(ids) == pool.num_used
            with_rows = sorted(a.slot for a in allocations if group in a.need.rows)
            assert with_rows == pool.row_addresses.nonzero().flatten().tolist()

    def _pool(self, shape: GroupShape, op: LoraOp) -> GroupPool:
        config = self.config
        page_bytes = shape.layers * op.layer_elements(shape) * config.dtype.itemsize
        return GroupPool(shape, page_bytes, config.memory_bytes // page_bytes, config.max_slots)


class _Page:
    """One layer of one page, as the terms of that layer fill it.

    a: [slices, 8, in] fp32;  b: [8, out] fp32;  mask: bit s for each slice s with a term.
    """

    def __init__(self, shape: GroupShape, digest: str) -> None:
        self._shape = shape
        self._digest = digest
        self.a = torch.zeros(len(shape.slices), PAGE_RANKS, shape.in_features)
        self.b = torch.zeros(PAGE_RANKS, shape.out_features)
        self.mask = 0

    def add(self, term: LoraTerm, first_rank: int) -> None:
        """Take ranks `[first_rank, first_rank + 8)` of `term`."""
        self._check(term)
        a = term.a[first_rank : first_rank + PAGE_RANKS]
        count = len(a)
        if count == 0:
            return
        end = term.offset + term.b.shape[0]
        for index, part in enumerate(self._shape.slices):
            if term.offset <= part.offset < end:
                if self.mask >> index & 1:
                    raise self._corrupt(term, "two rank terms on one module")
                self.a[index, :count] = a
                self.mask |= 1 << index
        columns = term.b[:, first_rank : first_rank + count]
        self.b[:count, term.offset : end] = columns.T

    def _check(self, term: LoraTerm) -> None:
        """The term covers whole slices and has the base's width."""
        edges = {part.offset for part in self._shape.slices} | {self._shape.out_features}
        end = term.offset + term.b.shape[0]
        if term.offset not in edges or end not in edges:
            raise self._corrupt(term, f"rows {term.offset} to {end} are not whole modules")
        if term.a.shape != (term.b.shape[1], self._shape.in_features):
            raise self._corrupt(
                term, f"A {list(term.a.shape)} does not fit B {list(term.b.shape)} and the base"
            )

    def _corrupt(self, term: LoraTerm, message: str) -> CorruptAdapterError:
        return CorruptAdapterError(self._digest, f"{term.group} of layer {term.layer}: {message}")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
