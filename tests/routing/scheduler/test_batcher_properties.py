"""Random arrivals, aborts, loads and shortages: nothing is lost, doubled, starved or leaked."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from polyloom.routing.scheduler.sequence import SequenceStatus

FINISHED = SequenceStatus.FINISHED
ADAPTERS = (None, None, "x", "y", "z", "bad")
TENANTS = {"one": 1.0, "two": 1.0, "light": 0.5}
arrivals = st.tuples(
    st.just("add"),
    st.integers(1, 40),
    st.integers(0, 12),
    st.sampled_from(ADAPTERS),
    st.sampled_from(sorted(TENANTS)),
    st.sampled_from((None, None, "talk", "chat")),
)
aborts = st.tuples(st.just("abort"), st.integers(0, 200))
steps = st.tuples(st.just("step"), st.integers(1, 4))
loads = st.tuples(st.just("load"))
scripts = st.lists(st.one_of(arrivals, arrivals, aborts, steps, steps, loads), max_size=80)
shapes = st.fixed_dictionaries(
    {
        "token_budget": st.integers(4, 24),
        "max_running": st.integers(1, 4),
        "num_blocks": st.integers(14, 40),
        "block_size": st.sampled_from((4, 8)),
    }
)


@settings(max_examples=300)
@given(shapes, scripts, st.integers(1, 3))
def test_everything_is_accounted_for(bench_factory, fake_adapters, shape, script, capacity):
    adapters = fake_adapters(capacity=capacity, broken=frozenset({"bad"}))
    bench = bench_factory(**shape, max_model_len=52, adapters=adapters)
    wanted, failed, aborted = {}, set(), set()
    conversations = defaultdict(list)

    def step():
        plan = bench.step()
        failed.update(item.sequence.sequence_id for item in plan.failed)
        for item in plan.scheduled:
            sequence = item.sequence
            if item.completes and sequence.request.sampling.max_tokens == 0:
                bench.model.outputs[sequence.sequence_id] = []
                bench.batcher.finish(sequence)
        assert bench.batcher.num_running <= shape["max_running"]
        for turns in conversations.values():
            waits = [t.admitted is None for t in turns if t.status is not FINISHED]
            assert waits == sorted(waits), "a turn of a conversation was overtaken"

    for action in script:
        match action:
            case ("add", prompt, max_tokens, adapter, tenant, conversation):
                name = f"s{len(wanted)}"
                sequence = bench.add(
                    name,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    adapter=adapter,
                    tenant=tenant,
                    weight=TENANTS[tenant],
                    conversation=conversation,
                )
                wanted[name] = max_tokens
                if conversation is not None:
                    conversations[tenant, conversation].append(sequence)
            case ("abort", index) if wanted:
                sequence = bench.batcher.get(f"s{index % len(wanted)}")
                if sequence is not None:
                    bench.batcher.finish(sequence)
                    aborted.add(sequence.sequence_id)
            case ("step", count):
                for _ in range(count):
                    step()
            case ("load",):
                bench.adapters.finish_loads()

    remaining = 200 + 60 * len(wanted)
    while bench.batcher.sequence_ids:
        bench.adapters.finish_loads()
        step()
        bench.now += 0.1
        remaining -= 1
        assert remaining > 0, "some sequence starves"

    bench.assert_clean()
    expected = {n: [*range(1000, 1000 + m)] for n, m in wanted.items()}
    for name, output in bench.model.outputs.items():
        assert output == expected[name]
    assert set(bench.model.outputs) | failed | aborted == set(wanted)
    assert not set(bench.model.outputs) & (failed | aborted)
