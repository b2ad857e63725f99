"""The page table of one module group: where each page and each slot's row vectors lie."""

import torch

from polyloom.adapters.base_layout import GroupShape


class GroupPool:
    """Page ids of one group, the memory behind them, and what the gather ops read.

    addresses: [capacity] int64, address of each page, 0 where none is.
    masks: [capacity, layers] int32, bit s set where the page has a rank term on slice s. An op
        reads nothing of a page where its bit is not set.
    row_addresses: [max_slots] int64, address of each slot's `[layers, 2, out]` fp32 row vectors
        (gain, then shift), 0 where the slot has none.
    pages: the same pages as `[layers, layer_elements]` tensors of the pool's dtype.
    rows: the same row vectors as tensors.

    All three tensors are on the host: an op on a device copies what it needs.
    """

    def __init__(self, shape: GroupShape, page_bytes: int, capacity: int, max_slots: int) -> None:
        self.shape = shape
        self.page_bytes = page_bytes
        self.capacity = capacity
        self.addresses = torch.zeros(capacity, dtype=torch.int64)
        self.masks = torch.zeros(capacity, shape.layers, dtype=torch.int32)
        self.row_addresses = torch.zeros(max_slots, dtype=torch.int64)
        self.pages: list[torch.Tensor | None] = [None] * capacity
        self.rows: list[torch.Tensor | None] = [None] * max_slots
        self._free = list(range(capacity - 1, -1, -1))

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot's row vectors."""
        return self.shape.layers * 2 * self.shape.out_features * torch.float32.itemsize

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def page(self, page_id: int) -> torch.Tensor:
        page = self.pages[page_id]
        if page is None:
            raise LookupError(f"page {page_id} of {self.shape.group} holds nothing")
        return page

    def add_page(self, page: torch.Tensor) -> int:
        """Give `page` an id. The caller's byte budget guarantees that one is free."""
        page_id = self._free.pop()
        self.pages[page_id] = page
        self.addresses[page_id] = page.data_ptr()
        return page_id

    def remove_page(self, page_id: int) -> None:
        """Forget a page: no table can lead to its memory any more."""
        self.page(page_id)
        self.pages[page_id] = None
        self.addresses[page_id] = 0
        self.masks[page_id].zero_()
        self._free.append(page_id)

    def set_rows(self, slot: int, rows: torch.Tensor) -> None:
        self.rows[slot] = rows
        self.row_addresses[slot] = rows.data_ptr()

    def remove_rows(self, slot: int) -> None:
        self.rows[slot] = None
        self.row_addresses[slot] = 0
