"""The life of a resident revision, step by step, with workers that run when told to."""

import gc
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch

from polyloom.adapters.base_layout import BaseLayout, ModuleGroup
from polyloom.adapters.errors import AdapterTooLargeError, CorruptAdapterError
from polyloom.adapters.kernels.reference import ReferenceLoraOp
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.residency import RETRY_SECONDS, Residency, ResidencyState
from polyloom.adapters.source import AdapterSource
from polyloom.adapters.weights import AdapterWeights

RESIDENT, LOADING = ResidencyState.RESIDENT, ResidencyState.LOADING
NO_ROOM, FAILED = ResidencyState.NO_ROOM, ResidencyState.FAILED


def source(number: int) -> AdapterSource:
    return AdapterSource(f"sha256:{number}", f"/revisions/{number}")


class Shelf:
    """A loader whose revisions are rank-8 attention adapters, unless told otherwise."""

    def __init__(self, revision: Callable[..., AdapterWeights]) -> None:
        self._revision = revision
        self.loads: Counter[str] = Counter()
        self.ranks: dict[str, int] = {}
        self.errors: dict[str, Exception] = {}

    def load(self, source: AdapterSource) -> AdapterWeights:
        self.loads[source.digest] += 1
        if source.digest in self.errors:
            raise self.errors[source.digest]
        number = int(source.digest.removeprefix("sha256:"))
        return self._revision(number, self.ranks.get(source.digest, 8), groups=(ModuleGroup.QKV,))


class World:
    """A residency with room for `fits` rank-8 revisions, on workers and a clock of the test."""

    def __init__(self, pages: AdapterPages, shelf: Shelf, workers: Any) -> None:
        self.now = 0.0
        self.pages = pages
        self.shelf = shelf
        self.workers = workers
        self.residency = Residency(pages, shelf, lambda: self.now, workers)

    def settle(self) -> None:
        """Run everything that wants to run."""
        self.residency.poll()
        while self.workers.jobs:
            self.workers.run_one()
            self.residency.poll()
        self.residency.check()

    def resident(self, number: int) -> None:
        assert self.residency.pin(source(number)) is not FAILED
        self.settle()
        assert self.residency.state(source(number).digest) is RESIDENT

    def held(self) -> set[str]:
        return {a.digest for a in self.residency.snapshot() if a.state != "loading"}


@pytest.fixture
def world(
    layout: BaseLayout,
    pool_config: Callable[..., Any],
    revision: Callable[..., AdapterWeights],
    workers: Any,
) -> Callable[[int], World]:
    def make(fits: int) -> World:
        op = ReferenceLoraOp()
        roomy = AdapterPages(pool_config(), layout, op)
        room = fits * roomy.pools[ModuleGroup.QKV].page_bytes
        pages = AdapterPages(pool_config(memory_bytes=room), layout, op)
        return World(pages, Shelf(revision), workers)

    return make


def test_a_revision_is_loaded_once_for_all_who_want_it(world: Callable[[int], World]) -> None:
    here = world(4)
    states = [here.residency.pin(source(1)) for _ in range(5)]
    assert states == [LOADING] * 5
    here.settle()
    assert here.residency.pin(source(1)) is RESIDENT
    assert here.shelf.loads == {"sha256:1": 1}
    (adapter,) = here.residency.snapshot()
    assert (adapter.pinned_by, adapter.requests, adapter.pages) == (6, 6, 1)
    assert here.residency.counters.loads == 1


def test_nothing_is_visible_before_its_pages_are_full(world: Callable[[int], World]) -> None:
    here = world(4)
    here.residency.pin(source(1))
    here.workers.run_one()
    here.residency.poll()  # read; packing waits for its worker
    assert here.residency.state("sha256:1") is LOADING
    with pytest.raises(ValueError, match="not ready to run"):
        here.residency.batch([("sha256:1", 1)])
    here.settle()
    assert here.residency.batch([("sha256:1", 1)]).slots.tolist() == [0]


def test_an_unpinned_revision_cannot_run(world: Callable[[int], World]) -> None:
    here = world(4)
    here.resident(1)
    here.residency.unpin("sha256:1")
    with pytest.raises(ValueError, match="0 pins"):
        here.residency.batch([("sha256:1", 1)])
    with pytest.raises(ValueError, match="more often than pinned"):
        here.residency.unpin("sha256:1")


def test_the_least_recently_used_is_evicted_and_pinned_ones_stay(
    world: Callable[[int], World],
) -> None:
    here = world(3)
    for number in (1, 2, 3):
        here.resident(number)
    for number in (2, 1, 3):
        here.residency.unpin(f"sha256:{number}")
    here.residency.pin(source(2))  # the oldest to be returned, but pinned again
    here.resident(4)
    assert here.held() == {"sha256:2", "sha256:3", "sha256:4"}
    assert here.residency.counters.evictions == 1


def test_without_room_it_waits_and_others_go_on(world: Callable[[int], World]) -> None:
    here = world(2)
    here.resident(1)
    here.resident(2)
    assert here.residency.pin(source(3)) is LOADING
    here.settle()
    assert here.residency.state("sha256:3") is NO_ROOM
    for _ in range(5):
        here.settle()
    assert here.shelf.loads["sha256:3"] == 1  # not read over and over
    assert len(here.residency.batch([("sha256:1", 1), (None, 4), ("sha256:2", 1)]).slots) == 3
    here.residency.unpin("sha256:1")
    here.settle()
    assert here.residency.state("sha256:3") is RESIDENT
    assert here.held() == {"sha256:2", "sha256:3"}


def test_small_ones_pass_one_that_waits_for_much_room(world: Callable[[int], World]) -> None:
    here = world(4)
    here.shelf.ranks["sha256:9"] = 32
    here.resident(1)
    here.residency.pin(source(9))
    here.settle()
    assert here.residency.state("sha256:9") is NO_ROOM
    here.resident(2)
    for number in (1, 2):
        here.residency.unpin(f"sha256:{number}")
    here.settle()
    assert here.residency.state("sha256:9") is RESIDENT


def test_one_that_waits_and_is_given_up_leaves_nothing(world: Callable[[int], World]) -> None:
    here = world(1)
    here.resident(1)
    here.residency.pin(source(2))
    here.settle()
    here.residency.unpin("sha256:2")
    assert {a.digest for a in here.residency.snapshot()} == {"sha256:1"}
    here.residency.unpin("sha256:1")
    here.settle()
    assert here.held() == {"sha256:1"}


def test_what_can_never_fit_fails_and_names_the_limit(world: Callable[[int], World]) -> None:
    here = world(2)
    here.shelf.ranks["sha256:1"] = 64
    here.residency.pin(source(1))
    here.settle()
    assert here.residency.state("sha256:1") is FAILED
    error = here.residency.failure("sha256:1")
    assert isinstance(error, AdapterTooLargeError) and "the limit is" in str(error)
    assert here.residency.quarantined == ()


def test_a_corrupt_revision_is_quarantined_without_a_retry(world: Callable[[int], World]) -> None:
    here = world(2)
    here.shelf.errors["sha256:1"] = CorruptAdapterError("sha256:1", "a byte rotted")
    here.residency.pin(source(1))
    here.resident(2)  # nobody else notices
    assert here.residency.state("sha256:1") is FAILED
    here.now += 10 * RETRY_SECONDS
    assert [here.residency.pin(source(1)) for _ in range(100)] == [FAILED] * 100
    assert here.shelf.loads["sha256:1"] == 1
    assert here.residency.quarantined == ("sha256:1",)
    here.residency.unpin("sha256:1")
    assert here.residency.pin(source(1)) is FAILED
    assert {a.digest for a in here.residency.snapshot()} == {"sha256:2"}


def test_a_revision_that_could_not_be_read_is_tried_again_later(
    world: Callable[[int], World],
) -> None:
    here = world(2)
    here.shelf.errors["sha256:1"] = OSError("too many open files")
    here.residency.pin(source(1))
    here.settle()
    assert "too many open files" in str(here.residency.failure("sha256:1"))
    here.residency.unpin("sha256:1")
    here.now += RETRY_SECONDS / 2
    assert here.residency.pin(source(1)) is FAILED
    assert here.residency.quarantined == ()
    here.now += RETRY_SECONDS
    del here.shelf.errors["sha256:1"]
    here.resident(1)


def test_terms_that_do_not_fit_the_base_fail_while_packing(
    world: Callable[[int], World], revision: Callable[..., AdapterWeights]
) -> None:
    here = world(4)
    twice = revision(1, 8, groups=(ModuleGroup.QKV,))
    here.shelf.load = lambda _: AdapterWeights("sha256:1", twice.terms * 2, ())  # type: ignore[method-assign]
    here.residency.pin(source(1))
    here.settle()
    assert here.residency.state("sha256:1") is FAILED
    assert here.pages.free_bytes == here.pages.config.memory_bytes
    assert here.residency.quarantined == ("sha256:1",)


def test_retiring_frees_at_once_what_nobody_runs(world: Callable[[int], World]) -> None:
    here = world(2)
    here.resident(1)
    here.residency.unpin("sha256:1")
    here.residency.retire("sha256:1")
    assert here.residency.snapshot() == ()
    assert here.pages.free_bytes == here.pages.config.memory_bytes


def test_retiring_drains_what_runs(world: Callable[[int], World]) -> None:
    here = world(2)
    for _ in range(3):
        here.resident(1)
    here.residency.retire("sha256:1")
    assert [a.state for a in here.residency.snapshot()] == ["draining"]
    for _ in range(2):
        here.residency.unpin("sha256:1")
        assert here.residency.batch([("sha256:1", 1)]).slots.tolist() == [0]
    here.residency.unpin("sha256:1")
    assert here.pages.free_bytes == here.pages.config.memory_bytes


@pytest.mark.parametrize("jobs_done", [0, 1])
def test_retiring_during_the_load_never_resurrects(
    jobs_done: int, world: Callable[[int], World]
) -> None:
    here = world(2)
    here.residency.pin(source(1))
    for _ in range(jobs_done):
        here.workers.run_one()
        here.residency.poll()
    here.residency.unpin("sha256:1")
    here.residency.retire("sha256:1")
    here.settle()
    assert here.residency.snapshot() == ()
    assert here.pages.free_bytes == here.pages.config.memory_bytes


def test_a_revision_retired_during_its_load_evicts_nobody(world: Callable[[int], World]) -> None:
    here = world(1)
    here.resident(1)
    here.residency.unpin("sha256:1")
    here.residency.pin(source(2))
    here.residency.unpin("sha256:2")
    here.residency.retire("sha256:2")
    here.settle()
    assert here.held() == {"sha256:1"}


def test_retiring_a_failed_revision_keeps_the_reason_for_those_who_wait(
    world: Callable[[int], World],
) -> None:
    here = world(2)
    here.shelf.errors["sha256:1"] = CorruptAdapterError("sha256:1", "a byte rotted")
    here.residency.pin(source(1))
    here.settle()
    here.residency.retire("sha256:1")
    assert "rotted" in str(here.residency.failure("sha256:1"))
    here.residency.unpin("sha256:1")
    assert here.residency.quarantined == ()
    del here.shelf.errors["sha256:1"]
    here.resident(1)


def test_at_most_two_revisions_are_read_at_a_time(world: Callable[[int], World]) -> None:
    here = world(8)
    for number in range(6):
        here.residency.pin(source(number))
    assert len(here.workers.jobs) == 2
    here.settle()
    assert len(here.held()) == 6


def test_a_thousand_loads_and_unloads_leave_memory_flat(
    layout: BaseLayout, pool_config: Callable[..., Any], revision: Callable[..., AdapterWeights]
) -> None:
    """On real threads. Each revision takes 0.2 MiB, so keeping one in twenty would show."""
    weights = revision(0, 64, groups=(ModuleGroup.GATE_UP,), gain=True)
    loader = type("Same", (), {"load": staticmethod(lambda _: weights)})()
    pages = AdapterPages(pool_config(), layout, ReferenceLoraOp())
    residency = Residency(pages, loader)
    process = psutil.Process()

    def cycle(number: int) -> None:
        residency.pin(source(number))
        done = threading.Event()
        while residency.state(f"sha256:{number}") is not RESIDENT:
            residency.poll()
            done.wait(0.0001)
        residency.unpin(f"sha256:{number}")
        residency.retire(f"sha256:{number}")

    for number in range(100):
        cycle(number)
    gc.collect()
    before, threads = process.memory_info().rss, threading.active_count()
    for number in range(100, 1100):
        cycle(number)
    gc.collect()
    assert process.memory_info().rss - before < 8 << 20
    assert threading.active_count() == threads
    assert residency.snapshot() == () and pages.free_bytes == pages.config.memory_bytes
    residency.check()
    residency.close()


def test_real_threads_load_what_a_batch_then_applies(
    layout: BaseLayout, pool_config: Callable[..., Any], revision: Callable[..., AdapterWeights]
) -> None:
    pages = AdapterPages(pool_config(), layout, ReferenceLoraOp())
    shelf = Shelf(revision)
    residency = Residency(pages, shelf)
    wanted = list(range(8))
    for number in wanted:
        residency.pin(source(number))
    pause = threading.Event()
    while any(residency.state(f"sha256:{number}") is not RESIDENT for number in wanted):
        residency.poll()
        pause.wait(0.0001)
    batch = residency.batch([(f"sha256:{number}", 1) for number in wanted])
    x, y = torch.ones(8, 72), torch.zeros(8, 144)
    ReferenceLoraOp().apply(pages.pools[ModuleGroup.QKV], 0, x, y, batch, None)
    for number in wanted:
        expected = torch.zeros(144)
        for term in revision(number, 8, groups=(ModuleGroup.QKV,)).terms:
            if term.layer == 0:
                expected[term.offset : term.offset + len(term.b)] = term.b @ term.a.sum(1)
        torch.testing.assert_close(y[number], expected)
    residency.close()
