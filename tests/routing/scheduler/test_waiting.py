"""The queue's order: tenants, then adapters, by what they were served; conversations in order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyloom.routing.scheduler.batch import ScheduledSequence
from polyloom.routing.scheduler.errors import QueueFullError
from polyloom.routing.scheduler.fairness import VirtualCounters
from polyloom.routing.scheduler.sequence import Sequence
from polyloom.routing.scheduler.waiting import WaitingQueue


def queue_of(request_factory, *rows, credit=0.0):
    """A queue of (name, options) rows in their order of arrival, and the sequences by name."""
    queue, sequences = WaitingQueue(1000, credit), {}
    for place, (name, options) in enumerate(rows):
        sequences[name] = Sequence(request_factory(name, **options), float(place))
        queue.append(sequences[name])
    return queue, sequences


def order(queue):
    return [sequence.sequence_id for sequence in queue.candidates()]


def run(queue, sequence, tokens):
    queue.shares.ran(ScheduledSequence(sequence, sequence.computed, tokens, completes=False))
    sequence.computed += tokens


def test_a_tenant_that_fills_the_queue_shuts_nobody_out(request_factory):
    queue = WaitingQueue(4, credit=0.0)

    def arrive(tenant, count):
        for _ in range(count):
            name = f"{tenant}{len(queue)}"
            queue.append(Sequence(request_factory(name, tenant=tenant), float(len(queue))))

    arrive("a", 4)
    arrive("b", 2)  # its half
    for tenant in ("a", "b"):
        with pytest.raises(QueueFullError):
            arrive(tenant, 1)
    arrive("c", 1)
    arrive("d", 1)
    with pytest.raises(QueueFullError):  # twice the limit
        arrive("e", 1)


def test_tenants_take_turns_and_of_one_the_order_is_that_of_arrival(request_factory):
    rows = [(f"a{i}", {"tenant": "a"}) for i in range(3)]
    rows += [(f"b{i}", {"tenant": "b"}) for i in range(2)]
    queue, _ = queue_of(request_factory, *rows)
    assert order(queue) == ["a0", "b0", "a1", "b1", "a2"]


def test_who_was_served_less_goes_first(request_factory):
    rows = [("a0", {"tenant": "a"}), ("b0", {"tenant": "b"}), ("a1", {"tenant": "a", "prompt": 20})]
    queue, sequences = queue_of(request_factory, *rows)
    queue.remove(sequences["a0"])
    run(queue, sequences["a0"], 4)
    assert order(queue) == ["b0", "a1"]


def test_adapters_of_a_tenant_take_turns(request_factory):
    rows = [(f"x{i}", {"adapter": "x"}) for i in range(3)] + [("y0", {"adapter": "y"})]
    queue, _ = queue_of(request_factory, *rows)
    assert order(queue) == ["x0", "y0", "x1", "x2"]


def test_many_adapters_are_still_one_tenant(request_factory):
    rows = [(f"a{i}", {"tenant": "a", "adapter": f"x{i}"}) for i in range(4)]
    rows += [(f"b{i}", {"tenant": "b"}) for i in range(4)]
    queue, _ = queue_of(request_factory, *rows)
    assert [name[0] for name in order(queue)] == ["a", "b"] * 4


def test_a_preempted_sequence_goes_first_within_its_tenant_only(request_factory):
    rows = [("b0", {"tenant": "b"}), ("a1", {"tenant": "a"}), ("b1", {"tenant": "b"})]
    queue, _ = queue_of(request_factory, *rows)
    preempted = Sequence(request_factory("a0", tenant="a", adapter="x", prompt=6), -1.0)
    run(queue, preempted, 5)
    queue.put_back(preempted)
    assert order(queue) == ["b0", "a0", "b1", "a1"]


def test_tokens_that_run_again_or_came_from_the_cache_are_free(request_factory):
    queue, sequences = queue_of(request_factory, ("a", {"prompt": 50}), ("b", {"tenant": "other"}))
    a = sequences["a"]
    a.computed = 20  # cached
    run(queue, a, 10)
    a.forget_cache()
    run(queue, a, 40)
    assert queue.shares.tenants["tenant"] == 20


def test_of_a_conversation_one_turn_is_offered_until_it_is_taken(request_factory):
    rows = [(f"t{i}", {"conversation": "talk", "adapter": "xy"[i % 2]}) for i in range(3)]
    rows += [("other tenant's", {"conversation": "talk", "tenant": "b"}), ("alone", {})]
    queue, sequences = queue_of(request_factory, *rows)
    assert set(order(queue)) == {"t0", "other tenant's", "alone"}
    offered = []
    for sequence in queue.candidates():
        offered.append(sequence.sequence_id)
        queue.remove(sequence)
    turns = [name for name in offered if name.startswith("t")]
    assert turns == sorted(turns)
    assert set(offered) | {s.sequence_id for s in queue} == set(sequences)


def test_nobody_saves_up_more_than_the_credit():
    counters = VirtualCounters(credit=10)
    counters.begin_waiting("busy", ())
    counters.charge("busy", 1000)
    counters.begin_waiting("idle", {"busy"})
    assert counters["idle"] == 990
    counters.charge("idle", 50)
    counters.begin_waiting("idle", {"busy"})
    assert counters["idle"] == 1040, "what was had is not forgiven while somebody waits"
    counters.begin_waiting("idle", ())
    assert counters["idle"] == counters["busy"] == 0


def test_credit_is_not_lent_on_to_those_who_come_later():
    counters = VirtualCounters(credit=10)
    counters.begin_waiting("busy", ())
    counters.charge("busy", 1000)
    counters.begin_waiting("first", {"busy"})
    counters.begin_waiting("second", {"busy", "first"})
    assert counters["first"] == counters["second"] == 990


names, tenants = st.integers(0, 30), st.sampled_from("abc")
actions = st.one_of(
    st.tuples(st.just("append"), tenants, st.sampled_from((None, "x", "y")), st.integers(1, 30)),
    st.tuples(st.just("take"), names, st.integers(1, 40)),
    st.tuples(st.just("put back"), names),
    st.tuples(st.just("abort"), names),
)


@settings(max_examples=200)
@given(st.lists(actions, max_size=60))
def test_everyone_is_offered_once_and_counters_only_grow_while_somebody_waits(
    request_factory, script
):
    queue, taken, counters = WaitingQueue(1000, 5.0), [], dict.fromkeys("abc", 0.0)
    for number, action in enumerate(script):
        waiting = list(queue.candidates())
        match action:
            case ("append", tenant, adapter, prompt):
                somebody_waits = bool(waiting)
                options = {"tenant": tenant, "adapter": adapter, "prompt": prompt}
                queue.append(Sequence(request_factory(f"s{number}", **options), float(number)))
                if not somebody_waits:
                    counters = dict.fromkeys("abc", 0.0)
            case ("take", index, tokens) if waiting:
                sequence = waiting[index % len(waiting)]
                queue.remove(sequence)
                run(queue, sequence, min(tokens, sequence.pending))
                taken.append(sequence)
            case ("put back", index) if taken:
                if not waiting:
                    counters = dict.fromkeys("abc", 0.0)
                queue.put_back(taken.pop(index % len(taken)))
            case ("abort", index) if waiting:
                queue.remove(waiting[index % len(waiting)])
        offered = order(queue)
        assert sorted(offered) == sorted(s.sequence_id for s in queue)
        assert len(offered) == len(set(offered)) == len(queue)
        for tenant, before in counters.items():
            assert queue.shares.tenants[tenant] >= before
            counters[tenant] = queue.shares.tenants[tenant]
