"""The batcher over blocks that sequences share: every token is run on its own true context, no
sequence starves behind blocks that others keep, and a cached prefix costs no step's budget."""

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyloom.kvcache import prefix_cache
from polyloom.kvcache.block_pool import BlockPool
from polyloom.kvcache.manager import KVCacheManager
from polyloom.kvcache.namespace import Namespace
from polyloom.kvcache.prefix_cache import PrefixCache
from polyloom.routing.scheduler.batch import StepPlan
from polyloom.routing.scheduler.batcher import Batcher
from polyloom.routing.scheduler.config import SchedulerConfig
from polyloom.routing.scheduler.sequence import Sequence

SIZE, MAX_MODEL_LEN = 4, 40


@pytest.fixture(autouse=True, scope="module")
def short_waits() -> Iterator[None]:
    """One block in common is worth a wait here: prompts are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_cache, "AWAITED_TOKENS", SIZE)
        yield


class SharingBench:
    """A batcher, its cache, and a model that remembers what every slot holds."""

    def __init__(self, adapters, num_blocks: int, token_budget: int, max_running: int) -> None:
        pool = BlockPool(num_blocks)
        self.cache = PrefixCache(pool, SIZE, SIZE, num_blocks - 10, self._copy)
        self.blocks = KVCacheManager(pool, SIZE, self.cache)
        config = SchedulerConfig(token_budget, max_running, 100, MAX_MODEL_LEN)
        self.batcher = Batcher(config, self.blocks, adapters)
        self.slots: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.now = 0.0
        self.ran = 0

    def _copy(self, source: int, target: int) -> None:
        for offset in range(SIZE):
            self.slots[target * SIZE + offset] = self.slots[source * SIZE + offset]

    def add(self, request, owner: str, hold: str | None = None) -> None:
        self.now += 0.001
        namespace = Namespace(
            owner_kind="tenant",
            owner_name=owner,
            base_digest="base",
            adapter_digest=None,
            tokenizer_digest="tokenizer",
            template_digest="template",
            tool_schema_digest=None,
            salt=None,
            kv_dtype="float32",
        )
        self.batcher.add(request, self.now)
        self.cache.open(request.sequence_id, namespace, request.prompt, hold)

    def end(self, sequence: Sequence) -> None:
        self.batcher.finish(sequence)
        self.cache.close(sequence.sequence_id)

    def step(self) -> StepPlan:
        self.now += 0.1
        plan = self.batcher.plan(self.now)
        for item in plan.scheduled:
            sequence, end = item.sequence, item.start + item.num_tokens
            for position in range(end):
                content = (sequence.tenant, tuple(sequence.tokens[: position + 1]))
                slot = self.blocks.slot(sequence.sequence_id, position)
                if position >= item.start:
                    self.slots[slot] = content
                assert self.slots[slot] == content, "a token was run on another's context"
        self.ran += plan.num_tokens
        self.batcher.commit(plan)
        for item in plan.scheduled:
            if item.samples:
                item.sequence.tokens.append(len(item.sequence.tokens) % 3)
            if item.completes:
                wanted = item.sequence.request.sampling.max_tokens
                if item.sequence.output_len == wanted:
                    self.end(item.sequence)
        return plan


arrivals = st.tuples(
    st.integers(1, 28),
    st.integers(0, 12),
    st.sampled_from(("one", "one", "two")),
    st.sampled_from((None, None, None, "held")),
)
scripts = st.lists(st.one_of(arrivals, arrivals, st.integers(1, 4), st.none()), max_size=40)


@settings(max_examples=120)
@given(scripts, st.integers(10, 20), st.integers(4, 16), st.integers(1, 4))
def test_every_token_runs_on_its_own_context(
    request_maker: Callable, fake_adapters, script, num_blocks, token_budget, max_running
) -> None:
    bench = SharingBench(fake_adapters(), num_blocks, max(token_budget, max_running), max_running)
    number = 0
    for action in script:
        match action:
            case (prompt, max_tokens, tenant, hold):
                number += 1
                name = f"s{number}"
                request = request_maker(name, prompt, max_tokens, tenant=tenant)
                fits = prompt // SIZE <= (num_blocks - 10) // 2
                bench.add(request, tenant, hold if fits else None)
            case None if number:
                sequence = bench.batcher.get(f"s{number}")
                if sequence is not None:
                    bench.end(sequence)
            case int(count):
                for _ in range(count):
                    bench.step()
    remaining = 200 + 60 * number
    while bench.batcher.sequence_ids:
        bench.step()
        remaining -= 1
        assert remaining > 0, "some sequence starves"
    bench.blocks.check_idle()
    assert bench.cache.index.cross_namespace_hits == 0


def test_what_is_cached_takes_no_budget_and_no_second_run(request_maker, fake_adapters) -> None:
    bench = SharingBench(fake_adapters(), num_blocks=32, token_budget=8, max_running=4)
    for name in ("first", "second"):
        bench.add(request_maker(name, prompt=26, max_tokens=1, tenant="one"), "one")
        while bench.batcher.sequence_ids:
            bench.step()
        bench.ran, ran = 0, bench.ran
        assert ran == {"first": 26, "second": 2}[name]


def names(plan: StepPlan) -> list[str]:
    return sorted(item.sequence.sequence_id for item in plan.scheduled)


def test_of_several_with_one_prompt_the_first_computes_it(request_maker, fake_adapters) -> None:
    bench = SharingBench(fake_adapters(), num_blocks=64, token_budget=64, max_running=8)
    for number in range(6):
        bench.add(request_maker(f"s{number}", prompt=33, max_tokens=1, tenant="one"), "one")
    bench.add(request_maker("other", prompt=9, max_tokens=1, tenant="two"), "two")
    assert names(bench.step()) == ["other", "s0"]
    assert names(bench.step()) == ["s1", "s2", "s3", "s4", "s5"]
    assert bench.ran == 9 + 33 + 5
    assert bench.batcher.sequence_ids == ()


def test_nobody_waits_for_a_prompt_that_nobody_computes_any_more(
    request_maker, fake_adapters
) -> None:
    bench = SharingBench(fake_adapters(), num_blocks=64, token_budget=10, max_running=8)
    for name in ("first", "second"):
        bench.add(request_maker(name, prompt=33, max_tokens=1, tenant="one"), "one")
    bench.step()
    assert names(bench.step()) == ["first"]
    first = bench.batcher.get("first")
    assert first is not None
    bench.end(first)
    assert names(bench.step()) == ["second"]
    while bench.batcher.sequence_ids:
        bench.step()
    assert bench.ran == 20 + 33 - 20


def test_nobody_waits_for_what_an_invalidation_has_cut_off(request_maker, fake_adapters) -> None:
    bench = SharingBench(fake_adapters(), num_blocks=64, token_budget=10, max_running=8)
    bench.add(request_maker("before", prompt=33, max_tokens=1, tenant="one"), "one")
    bench.step()
    bench.cache.invalidate(lambda namespace: True, "operator")
    bench.add(request_maker("after", prompt=33, max_tokens=1, tenant="one"), "one")
    while bench.batcher.get("before") is not None:
        names_now = names(bench.step())
    assert names_now == ["after", "before"]
