"""What the batcher promises, one promise a test."""

import pytest

from polyloom.routing.scheduler.config import SchedulerConfig
from polyloom.routing.scheduler.errors import (
    DuplicateSequenceError,
    NeverFitsError,
    QueueFullError,
)
from polyloom.routing.scheduler.sequence import SequenceStatus


def running(plan):
    return {item.sequence.sequence_id: item.num_tokens for item in plan.scheduled}


def test_a_long_prefill_is_cut_and_decodes_run_in_every_step(bench_factory):
    bench = bench_factory(token_budget=8)
    bench.add("short", prompt=3, max_tokens=20)
    assert running(bench.step()) == {"short": 3}
    bench.add("long", prompt=30, max_tokens=1)
    for _ in range(4):
        assert running(bench.step()) == {"short": 1, "long": 7}
    assert running(bench.step()) == {"short": 1, "long": 2}
    assert "long" in bench.model.outputs


def test_tokens_of_one_adapter_are_adjacent_and_the_base_comes_first(bench_factory):
    bench = bench_factory()
    for name, adapter in (("a", "x"), ("b", None), ("c", "y"), ("d", "x")):
        bench.add(name, prompt=2, adapter=adapter)
    bench.step()
    bench.adapters.finish_loads()
    order = [item.sequence.adapter_digest for item in bench.step().scheduled]
    assert order == [None, "x", "x", "y"]


def test_base_traffic_goes_on_while_more_adapters_load_than_may_run(bench_factory):
    bench = bench_factory(max_running=2)
    for index in range(5):
        bench.add(f"cold{index}", adapter=f"adapter{index}")
    bench.add("base", prompt=4, max_tokens=1)
    assert running(bench.step()) == {"base": 4}
    assert bench.batcher.get("cold0").status is SequenceStatus.LOADING
    assert bench.adapters.held == 2, "only the front of the queue pins"


def test_a_loaded_adapter_lets_its_sequence_run_and_counts_the_wait(bench_factory):
    bench = bench_factory()
    sequence = bench.add("a", adapter="x", max_tokens=1)
    assert bench.step().scheduled == ()
    bench.adapters.finish_loads()
    assert running(bench.step()) == {"a": 4}
    assert sequence.adapter_load == pytest.approx(0.01)
    bench.assert_clean()


def test_a_broken_adapter_ends_its_sequences_and_no_other(bench_factory, fake_adapters):
    bench = bench_factory(adapters=fake_adapters(broken=frozenset({"bad"})))
    bench.add("a", adapter="bad")
    bench.add("b", adapter="good", max_tokens=1)
    bench.step()
    bench.adapters.finish_loads()
    plan = bench.step()
    assert [failed.sequence.sequence_id for failed in plan.failed] == ["a"]
    assert "b" in bench.model.outputs
    bench.assert_clean()


def test_an_adapter_without_room_is_not_overtaken_for_ever(bench_factory, fake_adapters):
    bench = bench_factory(adapters=fake_adapters(capacity=1), max_running=2)
    bench.add("hot0", adapter="hot", max_tokens=40)
    bench.step()
    bench.adapters.finish_loads()
    bench.add("cold", adapter="cold", max_tokens=1)
    for index in range(1, 1000):
        bench.adapters.finish_loads()
        bench.add(f"hot{index}", adapter="hot", max_tokens=4, prompt=2)
        bench.step()
        if "cold" in bench.model.outputs:
            break
        bench.now += 0.1
    assert "cold" in bench.model.outputs
    assert index < 100, "it waited for much more than its patience"


def test_the_youngest_is_preempted_keeps_its_tokens_and_finishes(bench_factory):
    bench = bench_factory(num_blocks=6, max_model_len=24, block_size=4)
    old = bench.add("old", prompt=8, max_tokens=12)
    young = bench.add("young", prompt=8, max_tokens=12)
    while bench.batcher.sequence_ids:
        bench.step()
    assert (old.preemptions, bench.batcher.preemptions_total) == (0, young.preemptions)
    assert young.preemptions > 0
    assert bench.model.outputs == {n: [*range(1000, 1012)] for n in ("old", "young")}
    bench.assert_clean()


def test_aborting_frees_blocks_and_pins_before_the_next_step(bench_factory):
    bench = bench_factory(max_running=2)
    bench.add("loading", adapter="x")
    bench.add("running", prompt=20, max_tokens=20)
    bench.add("second", prompt=4, max_tokens=20)
    bench.add("waiting", prompt=4)
    bench.step()
    bench.step()
    assert bench.batcher.num_running == 2
    for name in ("loading", "running", "second", "waiting"):
        bench.batcher.finish(bench.batcher.get(name))
    bench.assert_clean()


def test_a_finished_sequence_can_be_finished_again(bench_factory):
    bench = bench_factory()
    sequence = bench.add("a")
    bench.step()
    bench.batcher.finish(sequence)
    bench.batcher.finish(sequence)
    bench.assert_clean()


def test_refusals_take_nothing(bench_factory):
    bench = bench_factory(queue_limit=2, max_model_len=16)
    with pytest.raises(NeverFitsError, match="limit of 16"):
        bench.add("large", prompt=10, max_tokens=7)
    bench.add("a", prompt=10, max_tokens=6)
    with pytest.raises(DuplicateSequenceError):
        bench.add("a")
    bench.add("b")
    with pytest.raises(QueueFullError):
        bench.add("c")
    assert bench.batcher.sequence_ids == ("a", "b")


def test_deadlines_are_reported_once_and_only_for_what_lives(bench_factory):
    bench = bench_factory()
    late = bench.add("late", deadline=100.0)
    gone = bench.add("gone", deadline=90.0)
    bench.add("later", deadline=200.0)
    bench.add("never")
    bench.batcher.finish(gone)
    assert bench.batcher.overdue(99.0) == []
    assert bench.batcher.overdue(150.0) == [late]
    assert bench.batcher.overdue(150.0) == []


def test_impossible_limits_are_refused_by_name():
    with pytest.raises(ValueError, match="queue_limit"):
        SchedulerConfig(token_budget=8, max_running=4, queue_limit=0, max_model_len=8)
    with pytest.raises(ValueError, match="max_running"):
        SchedulerConfig(token_budget=8, max_running=9, queue_limit=1, max_model_len=8)


def test_a_cache_smaller_than_one_sequence_is_refused(bench_factory):
    with pytest.raises(ValueError, match="max_model_len"):
        bench_factory(num_blocks=2, block_size=4, max_model_len=9)
