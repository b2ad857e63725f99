"""A batcher over the real block manager, fake adapters, and a fake model that remembers its work."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from polyloom.adapters.errors import AdapterError
from polyloom.adapters.residency import ResidencyState
from polyloom.adapters.source import AdapterSource
from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.manager import KVCacheManager
from polyloom.routing.combination import Combination
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams
from polyloom.routing.scheduler.batch import StepPlan
from polyloom.routing.scheduler.batcher import Batcher
from polyloom.routing.scheduler.config import SchedulerConfig
from polyloom.routing.scheduler.sequence import Sequence


def make_request(
    name: str,
    prompt: int = 4,
    max_tokens: int = 3,
    adapter: str | None = None,
    deadline: float | None = None,
    tenant: str = "tenant",
    weight: float = 1.0,
    conversation: str | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        sequence_id=name,
        tenant=tenant,
        combination=Combination("sha256:base", "sha256:template", adapter),
        adapter=None if adapter is None else AdapterSource(adapter, f"/{adapter}"),
        prompt=tuple(range(1, prompt + 1)),
        sampling=SamplingParams(max_tokens=max_tokens, seed=0),
        deadline=deadline,
        weight=weight,
        conversation=conversation,
    )


@dataclass
class FakeAdapters:
    """Room for `capacity` revisions; a load ends when the test calls `finish_loads`.

    Like the real residency, a pinned revision without room is NO_ROOM until another's pins drain.
    """

    capacity: int = 4
    broken: frozenset[str] = frozenset()
    pins: Counter[str] = field(default_factory=Counter)
    states: dict[str, ResidencyState] = field(default_factory=dict)

    def pin(self, source: AdapterSource) -> ResidencyState:
        digest = source.digest
        self.pins[digest] += 1
        if digest not in self.states:
            self.states[digest] = ResidencyState.NO_ROOM
            self._make_room()
        return self.states[digest]

    def state(self, digest: str) -> ResidencyState:
        assert self.pins[digest] > 0
        return self.states[digest]

    def unpin(self, digest: str) -> None:
        assert self.pins[digest] > 0
        self.pins[digest] -= 1
        if self.pins[digest] == 0 and self.states[digest] is not ResidencyState.RESIDENT:
            del self.states[digest]
        self._make_room()

    def failure(self, digest: str) -> AdapterError:
        return AdapterError(f"{digest} is broken")

    def finish_loads(self) -> None:
        for digest, state in self.states.items():
            if state is ResidencyState.LOADING:
                broken = digest in self.broken
                self.states[digest] = ResidencyState.FAILED if broken else ResidencyState.RESIDENT

    @property
    def held(self) -> int:
        return sum(self.pins.values())

    def _make_room(self) -> None:
        for digest, state in tuple(self.states.items()):
            if state is not ResidencyState.NO_ROOM:
                continue
            placed = [d for d, s in self.states.items() if s is not ResidencyState.NO_ROOM]
            idle = [d for d in placed if self.pins[d] == 0]
            if len(placed) >= self.capacity and idle:
                del self.states[idle[0]]
                placed.remove(idle[0])
            if len(placed) < self.capacity:
                self.states[digest] = ResidencyState.LOADING


class FakeModel:
    """Checks that every token is computed exactly once between two losses of the cache, in order,
    and 'samples' a token that depends on the sequence and the position alone."""

    def __init__(self, batcher: Batcher, blocks: KVCacheManager) -> None:
        self._batcher = batcher
        self._blocks = blocks
        self._computed: dict[str, tuple[int, int]] = {}
        self.outputs: dict[str, list[int]] = {}

    def run(self, plan: StepPlan) -> list[Sequence]:
        """Run a plan; the sequences that finished."""
        assert plan.num_tokens <= self._batcher.config.token_budget
        finished = []
        for item in plan.scheduled:
            sequence = item.sequence
            losses, computed = self._computed.get(sequence.sequence_id, (0, 0))
            expected = computed if losses == sequence.preemptions else 0
            assert item.start == expected, "a token was skipped or computed twice"
            assert item.num_tokens > 0
            end = item.start + item.num_tokens
            held = len(self._blocks.blocks(sequence.sequence_id))
            assert held >= self._blocks.blocks_for(end), "tokens without blocks"
            self._computed[sequence.sequence_id] = (sequence.preemptions, end)
        self._batcher.commit(plan)
        for item in plan.scheduled:
            if item.samples:
                sequence = item.sequence
                assert sequence.computed == len(sequence.tokens)
                sequence.tokens.append(1000 + sequence.output_len)
                if sequence.output_len == sequence.request.sampling.max_tokens:
                    self.outputs[sequence.sequence_id] = sequence.tokens[sequence.prompt_len :]
                    self._batcher.finish(sequence)
                    finished.append(sequence)
        return finished


@dataclass
class Bench:
    """Everything a scheduler test needs, with a clock that only the test moves."""

    batcher: Batcher
    blocks: KVCacheManager
    adapters: FakeAdapters
    model: FakeModel
    now: float = 0.0

    def add(self, name: str, **options: object) -> Sequence:
        self.now += 0.001
        return self.batcher.add(make_request(name, **options), self.now)  # type: ignore[arg-type]

    def step(self) -> StepPlan:
        self.now += 0.01
        plan = self.batcher.plan(self.now)
        self.model.run(plan)
        return plan

    def assert_clean(self) -> None:
        self.blocks.check_idle()
        assert self.adapters.held == 0
        assert self.batcher.num_running == self.batcher.num_waiting == 0
        assert self.batcher.sequence_ids == ()


@dataclass(frozen=True)
class Arrival:
    """A request that a simulated tenant sends at `time`."""

    time: float
    name: str
    tenant: str
    prompt: int
    max_tokens: int
    adapter: str | None = None
    weight: float = 1.0

    def request(self) -> GenerationRequest:
        return make_request(
            self.name,
            self.prompt,
            self.max_tokens,
            self.adapter,
            tenant=self.tenant,
            weight=self.weight,
        )


@dataclass
class Served:
    """What a simulation saw.

    tokens: prompt tokens run once and tokens generated, by tenant.  first: seconds from arrival to
    the first token, by sequence.  gaps: seconds between tokens.  steps: seconds of each step.
    """

    tokens: Counter[str] = field(default_factory=Counter)
    first: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    steps: list[float] = field(default_factory=list)
    seconds: float = 0.0


def linear_cost(plan: StepPlan) -> float:
    """20 ms and 0.5 ms a token."""
    return 0.02 + 0.0005 * plan.num_tokens


def simulate(
    bench: Bench,
    arrivals: list[Arrival],
    until: float = math.inf,
    cost: Callable[[StepPlan], float] = linear_cost,
) -> Served:
    """Run steps of `cost` seconds until all is answered, or `until`; a load takes one step."""
    served, coming = Served(), sorted(arrivals, key=lambda arrival: -arrival.time)
    latest: dict[str, float] = {}
    bench.now = 0.0
    while bench.now < until and (coming or bench.batcher.sequence_ids):
        while coming and coming[-1].time <= bench.now:
            bench.batcher.add(coming[-1].request(), coming.pop().time)
        plan = bench.batcher.plan(bench.now)
        bench.adapters.finish_loads()
        seconds = cost(plan) if plan.scheduled else 0.001
        bench.now += seconds
        charged = {item.sequence.sequence_id: item.sequence.charged for item in plan.scheduled}
        served.finished |= {sequence.sequence_id for sequence in bench.model.run(plan)}
        if plan.scheduled:
            bench.batcher.ran(plan, seconds)
            served.steps.append(seconds)
        for item in plan.scheduled:
            sequence = item.sequence
            served.tokens[sequence.tenant] += sequence.charged - charged[sequence.sequence_id]
            if not item.samples:
                continue
            if sequence.sequence_id in latest:
                served.gaps.append(bench.now - latest[sequence.sequence_id])
            else:
                served.first[sequence.sequence_id] = bench.now - sequence.arrival
            latest[sequence.sequence_id] = bench.now
    served.seconds = bench.now
    return served


def make_bench(
    *,
    token_budget: int = 16,
    max_running: int = 4,
    queue_limit: int = 100,
    max_model_len: int = 64,
    num_blocks: int = 32,
    block_size: int = 4,
    adapters: FakeAdapters | None = None,
    itl_target: float = math.inf,
) -> Bench:
    blocks = KVCacheManager(BlockPool(num_blocks), block_size)
    adapters = adapters or FakeAdapters()
    config = SchedulerConfig(
        token_budget, max_running, queue_limit, max_model_len, itl_target=itl_target
    )
    batcher = Batcher(config, blocks, adapters)
    return Bench(batcher, blocks, adapters, FakeModel(batcher, blocks))


@pytest.fixture(scope="session")
def request_maker() -> Callable[..., GenerationRequest]:
    return make_request


@pytest.fixture(scope="session")
def bench_factory() -> Callable[..., Bench]:
    return make_bench


@pytest.fixture(scope="session")
def simulation() -> Callable[..., Served]:
    return simulate


@pytest.fixture(scope="session")
def arrival() -> type[Arrival]:
    return Arrival


@pytest.fixture(scope="session")
def request_factory() -> Callable[..., GenerationRequest]:
    return make_request


@pytest.fixture(scope="session")
def fake_adapters() -> type[FakeAdapters]:
    return FakeAdapters
