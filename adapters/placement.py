"""Where a revision lies on the device."""

from dataclasses import dataclass

from polyloom.adapters.base_layout import ModuleGroup


@dataclass(frozen=True)
class PageNeed:
    """What a revision takes: pages by group, groups with row vectors, and their bytes in all."""

    pages: dict[ModuleGroup, int]
    rows: frozenset[ModuleGroup]
    num_bytes: int


@dataclass(frozen=True, eq=False)
class Allocation:
    """A revision's place on the device.

    pages: page ids by group, in order of rank.
    """

    slot: int
    need: PageNeed
    pages: dict[ModuleGroup, tuple[int, ...]]

    @property
    def num_pages(self) -> int:
        return sum(len(ids) for ids in self.pages.values())
