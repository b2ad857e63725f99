"""Whose turn is taken, and how long one waits at most."""

import itertools

import pytest

STEP = 0.12
"""Seconds of one step and its arrivals, at most, where a test moves the clock by 0.1 s a step."""


def names(plan):
    return {item.sequence.sequence_id for item in plan.scheduled}


def flood(bench, count, **options):
    return [bench.add(f"flood{i}", tenant="flood", **options) for i in range(count)]


def test_a_tenant_below_its_share_runs_in_the_next_step(bench_factory):
    bench = bench_factory(max_running=3, num_blocks=64, token_budget=64)
    flood(bench, 10, prompt=8, max_tokens=40)
    bench.step()
    bench.step()
    small = bench.add("small", tenant="modest", prompt=5, max_tokens=2)
    assert names(bench.step()) == {"flood0", "flood1", "small"}
    assert small.output_len == 1


def test_whose_turn_was_taken_goes_on_where_it_was(bench_factory):
    bench = bench_factory(max_running=2, num_blocks=64, token_budget=64)
    sequences = flood(bench, 2, prompt=8, max_tokens=10)
    bench.step()
    bench.step()
    bench.add("small", tenant="modest", prompt=5, max_tokens=1)
    assert names(bench.step()) == {"flood0", "small"}
    assert names(bench.step()) == {"flood0", "flood1"}
    while bench.batcher.sequence_ids:
        bench.step()
    assert (bench.batcher.pauses_total, bench.batcher.preemptions_total) == (1, 0)
    assert all(sequence.preemptions == 0 for sequence in sequences)
    assert len(bench.model.outputs["flood1"]) == 10
    bench.assert_clean()


def test_turns_are_not_taken_back_and_forth(bench_factory):
    bench = bench_factory(max_running=4, num_blocks=200, token_budget=64)
    flood(bench, 8, prompt=4, max_tokens=40)
    bench.step()
    for index in range(8):
        bench.add(f"b{index}", tenant="b", prompt=4, max_tokens=40)
    for _ in range(30):
        plan = bench.step()
        assert bench.batcher.pauses_total <= 2
    assert sorted(item.sequence.tenant for item in plan.scheduled) == ["b", "b", "flood", "flood"]


def test_a_paused_sequence_gives_its_blocks_to_who_needs_them(bench_factory):
    bench = bench_factory(max_running=2, num_blocks=10, block_size=4, max_model_len=32)
    flood(bench, 2, prompt=8, max_tokens=8)
    bench.step()
    bench.step()
    bench.add("small", tenant="modest", prompt=12, max_tokens=8)
    while bench.batcher.sequence_ids:
        bench.step()
    assert bench.batcher.pauses_total >= 1
    assert bench.batcher.preemptions_total >= 1
    assert {name: len(o) for name, o in bench.model.outputs.items()} == dict.fromkeys(
        ("flood0", "flood1", "small"), 8
    )
    bench.assert_clean()


def test_when_blocks_run_out_the_tenant_that_holds_most_gives_its_youngest(bench_factory):
    bench = bench_factory(num_blocks=10, block_size=4, max_model_len=24, token_budget=64)
    old = flood(bench, 3, prompt=8, max_tokens=12)
    late = bench.add("late", tenant="modest", prompt=8, max_tokens=12)
    while bench.batcher.sequence_ids:
        bench.step()
    assert late.preemptions == 0
    assert old[2].preemptions > 0
    assert old[0].preemptions == 0
    bench.assert_clean()


@pytest.mark.parametrize(
    ("tenants", "large_s"),
    [(["small"], "small"), (["small"], "own"), ([f"t{i}" for i in range(1000)], "own")],
    ids=["one tenant", "two tenants", "many tenants"],
)
def test_a_large_sequence_waits_for_its_blocks_no_longer_than_said(bench_factory, tenants, large_s):
    """Small ones keep coming and would take every block that gets free."""
    bench = bench_factory(
        num_blocks=24,
        block_size=4,
        max_model_len=90,
        max_running=8,
        token_budget=64,
        queue_limit=1000,
    )
    small = itertools.count()

    def add_small():
        number = next(small)
        tenant = tenants[number % len(tenants)]
        bench.add(f"small{number}", tenant=tenant, prompt=8, max_tokens=3 + number % 3)

    for _ in range(8):
        add_small()
    bench.step()
    large = bench.add("large", tenant=large_s, prompt=80, max_tokens=2)
    served, longest_left = 0, 5
    latest = bench.now + bench.batcher.config.block_patience + STEP * (longest_left + 2)
    while large.admitted is None:
        for _ in range(3):
            add_small()
        bench.now += 0.1
        served += sum(item.sequence is not large for item in bench.step().scheduled)
        assert bench.now <= latest, "it waited for longer than its patience"
    assert served > 0, "others go on while it waits"
    while "large" not in bench.model.outputs:
        bench.step()


def test_who_is_out_of_patience_goes_before_tenants_that_are_owed_more(bench_factory):
    """Its tenant decodes beyond its share all the time, and others' prompts take every step."""
    bench = bench_factory(num_blocks=40, block_size=4, max_model_len=90, max_running=8)
    own = {"tenant": "own", "weight": 0.05}
    bench.add("first", tenant="other", prompt=80, max_tokens=9)
    bench.add("long", prompt=4, max_tokens=60, **own)
    while bench.batcher.get("first").output_len == 0:
        bench.step()
    large = bench.add("large", prompt=80, max_tokens=2, **own)
    bench.step()
    assert large.no_blocks_since is not None
    latest = bench.now + bench.batcher.config.block_patience + STEP
    number = itertools.count()
    while large.admitted is None:
        for _ in range(2):
            bench.add(f"small{next(number)}", tenant="other", prompt=16, max_tokens=1)
        bench.now += 0.1
        bench.step()
        assert bench.now <= latest, "it waited for longer than its patience"
    assert bench.batcher.get("long") is not None


def test_a_weight_is_a_share_of_the_places(bench_factory):
    bench = bench_factory(max_running=6, num_blocks=200, token_budget=64)
    for index in range(8):
        bench.add(f"heavy{index}", tenant="heavy", weight=2.0, prompt=4, max_tokens=50)
        bench.add(f"light{index}", tenant="light", prompt=4, max_tokens=50)
    for _ in range(20):
        plan = bench.step()
    tenants = [item.sequence.tenant for item in plan.scheduled]
    assert (tenants.count("heavy"), tenants.count("light")) == (4, 2)
