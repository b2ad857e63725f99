"""Random lives of many revisions at once: the accounts always agree, and weights are never mixed."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from polyloom.adapters.base_layout import BaseLayout, ModuleGroup
from polyloom.adapters.config import AdapterPoolConfig
from polyloom.adapters.errors import CorruptAdapterError
from polyloom.adapters.kernels.reference import ReferenceLoraOp
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.residency import RETRY_SECONDS, Residency, ResidencyState
from polyloom.adapters.source import AdapterSource
from polyloom.adapters.weights import AdapterWeights

NUMBERS = st.integers(0, 9)
RANKS = (1, 8, 9, 16, 24, 64, 65, 8, 12, 40)  # 65 is over the limit
GROUPS = (ModuleGroup.QKV, ModuleGroup.DOWN)


def build_machine(
    layout: BaseLayout, revision: Callable[..., AdapterWeights], workers_type: type[Any]
) -> type[RuleBasedStateMachine]:
    op = ReferenceLoraOp()
    revisions = [
        revision(number, rank, groups=GROUPS[: 1 + number % 2], gain=number % 3 == 0)
        for number, rank in enumerate(RANKS)
    ]

    class ResidencyMachine(RuleBasedStateMachine):
        """The model is only this: how many pins the test holds on each revision."""

        @initialize(pages=st.integers(8, 24), slots=st.integers(1, 6))
        def start(self, pages: int, slots: int) -> None:
            page_bytes = 8 * (3 * 72 + 144) * 4 * 2
            config = AdapterPoolConfig(
                pages * page_bytes, slots, 64, torch.float32, torch.device("cpu")
            )
            self.now = 0.0
            self.broken: dict[str, Exception] = {}
            self.pins: Counter[int] = Counter()
            self.workers = workers_type()
            self.pages = AdapterPages(config, layout, op)
            self.residency = Residency(self.pages, self, lambda: self.now, self.workers)

        def load(self, source: AdapterSource) -> AdapterWeights:
            if source.digest in self.broken:
                raise self.broken[source.digest]
            return revisions[int(source.digest.removeprefix("sha256:"))]

        @rule(number=NUMBERS)
        def pin(self, number: int) -> None:
            state = self.residency.pin(AdapterSource(f"sha256:{number}", ""))
            if state is ResidencyState.FAILED:
                assert self.residency.failure(f"sha256:{number}")
            else:
                self.pins[number] += 1

        @precondition(lambda self: self.pins)
        @rule(data=st.data())
        def unpin(self, data: st.DataObject) -> None:
            number = data.draw(st.sampled_from(sorted(self.pins)))
            self.residency.unpin(f"sha256:{number}")
            self.pins -= Counter([number])

        @rule(number=NUMBERS)
        def retire(self, number: int) -> None:
            self.residency.retire(f"sha256:{number}")

        @rule(number=NUMBERS, corrupt=st.booleans())
        def break_files(self, number: int, corrupt: bool) -> None:
            digest = f"sha256:{number}"
            self.broken[digest] = (
                CorruptAdapterError(digest, "rotted") if corrupt else OSError("busy")
            )

        @rule(number=NUMBERS)
        def mend_files(self, number: int) -> None:
            self.broken.pop(f"sha256:{number}", None)

        @precondition(lambda self: self.workers.jobs)
        @rule(data=st.data())
        def finish_a_job(self, data: st.DataObject) -> None:
            self.workers.run_one(data.draw(st.integers(0, len(self.workers.jobs) - 1)))

        @rule()
        def poll(self) -> None:
            self.residency.poll()

        @rule()
        def wait(self) -> None:
            self.now += RETRY_SECONDS + 1

        @rule(group=st.sampled_from(GROUPS), base=st.booleans())
        def run(self, group: ModuleGroup, base: bool) -> None:
            """Every pinned revision that is resident acts as itself, and the base as the base."""
            ready = [
                number
                for number in sorted(self.pins)
                if self.residency.state(f"sha256:{number}") is ResidencyState.RESIDENT
            ]
            segments: list[tuple[str | None, int]] = [(f"sha256:{n}", 1) for n in ready]
            if base:
                segments.append((None, 1))
            if not segments:
                return
            batch = self.residency.batch(segments)
            pool = self.pages.pools[group]
            x = torch.ones(len(segments), pool.shape.in_features)
            y = torch.ones(len(segments), pool.shape.out_features)
            op.apply(pool, 0, x, y, batch, None)
            for row, number in enumerate(ready):
                torch.testing.assert_close(y[row], self.expected(number, group))
            if base:
                assert torch.equal(y[-1], torch.ones_like(y[-1]))

        def expected(self, number: int, group: ModuleGroup) -> torch.Tensor:
            y = torch.ones(self.pages.pools[group].shape.out_features)
            for row in revisions[number].rows:
                if row.group is group and row.layer == 0 and row.gain is not None:
                    y[row.offset : row.offset + len(row.gain)] *= row.gain
            for term in revisions[number].terms:
                if term.group is group and term.layer == 0:
                    y[term.offset : term.offset + len(term.b)] += term.b @ term.a.sum(1)
            return y

        @invariant()
        def accounts_agree(self) -> None:
            self.residency.check()
            held = {a.digest: a.pinned_by for a in self.residency.snapshot()}
            for number in range(len(RANKS)):
                assert held.get(f"sha256:{number}", 0) == self.pins[number]

        def teardown(self) -> None:
            """With all pins returned, what was evicted, parked or failed has left nothing."""
            for number in list(self.pins.elements()):
                self.residency.unpin(f"sha256:{number}")
            self.residency.poll()
            while self.workers.jobs:
                self.workers.run_one()
                self.residency.poll()
            for number in range(len(RANKS)):
                self.residency.retire(f"sha256:{number}")
            assert self.residency.snapshot() == ()
            assert self.pages.free_bytes == self.pages.config.memory_bytes
            self.pages.check([])

    return ResidencyMachine


def test_random_lives(
    layout: BaseLayout, revision: Callable[..., AdapterWeights], workers_type: type[Any]
) -> None:
    run_state_machine_as_test(
        build_machine(layout, revision, workers_type),
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=True,
        ),
    )


@pytest.mark.slow
def test_random_lives_at_length(
    layout: BaseLayout, revision: Callable[..., AdapterWeights], workers_type: type[Any]
) -> None:
    run_state_machine_as_test(
        build_machine(layout, revision, workers_type),
        settings=settings(
            max_examples=400,
            stateful_step_count=80,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
            derandomize=True,
        ),
    )
