"""The step-cost fit, and the chunk sizes that follow from it."""

import random

import pytest

from polyloom.routing.scheduler.chunking import FIRST, FLOOR, ChunkSizer, StepCosts

TARGET = 0.1


def seconds(decodes, prompt_tokens, attended):
    return 0.012 + 0.0008 * decodes + 0.0007 * prompt_tokens + 2e-8 * attended


def measure(costs, count, rng, slowness=1.0, prompts=(0, 64, 96, 128, 256)):
    """Steps of a mixed load, each up to a tenth off, a few much slower than that."""
    for _ in range(count):
        decodes, prompt = rng.randint(1, 40), rng.choice(prompts)
        attended = decodes * rng.randint(50, 500) + prompt * rng.randint(prompt, 1500)
        noise = rng.uniform(0.9, 1.1) * (20 if rng.random() < 0.01 else 1)
        costs.measured(
            decodes, prompt, attended, slowness * noise * seconds(decodes, prompt, attended)
        )


def test_the_fit_finds_what_a_step_costs_through_noise():
    costs = StepCosts()
    measure(costs, 300, random.Random(0))
    for step in ((4, 0, 1000), (32, 64, 20_000), (16, 256, 200_000)):
        assert costs.predict(*step) == pytest.approx(seconds(*step), rel=0.15)
    assert costs.error < 0.15


def test_it_follows_a_machine_that_becomes_slower():
    costs, rng = StepCosts(), random.Random(0)
    measure(costs, 200, rng)
    measure(costs, 200, rng, slowness=2.0)
    assert costs.predict(16, 128, 50_000) == pytest.approx(2 * seconds(16, 128, 50_000), rel=0.15)


def test_decodes_alone_do_not_make_it_forget_what_a_prompt_costs():
    costs, rng = StepCosts(), random.Random(0)
    measure(costs, 200, rng)
    measure(costs, 2000, rng, prompts=(0,))
    assert costs.predict(16, 128, 50_000) == pytest.approx(seconds(16, 128, 50_000), rel=0.15)


def decoding(bench, count):
    """A bench whose `count` sequences all decode."""
    for index in range(count):
        bench.add(f"decoding{index}", prompt=1, max_tokens=500)
    bench.step()


def bench_of(bench_factory, target):
    return bench_factory(
        token_budget=512,
        max_running=64,
        max_model_len=4096,
        num_blocks=4096,
        block_size=16,
        itl_target=target,
    )


def learn(bench, slowness):
    """Let it measure steps of the cost above."""
    measure(bench.batcher.chunks.costs, 300, random.Random(1), slowness)


@pytest.mark.parametrize(("slowness", "decodes"), [(1.0, 8), (1.0, 40), (0.5, 8)])
def test_a_chunk_fills_the_target_and_not_more(bench_factory, slowness, decodes):
    bench = bench_of(bench_factory, TARGET)
    decoding(bench, decodes)
    learn(bench, slowness)
    bench.add("long", prompt=3000, max_tokens=1)
    for _ in range(4):  # a size at most doubles from step to step
        plan = bench.step()
    chunk = next(item for item in plan.scheduled if not item.decodes)
    attended = sum(item.attended for item in plan.scheduled)
    took = slowness * seconds(decodes, chunk.num_tokens, attended)
    assert 0.75 * TARGET <= took <= TARGET


def test_a_chunk_has_a_floor_where_decodes_alone_are_too_slow(bench_factory):
    bench = bench_of(bench_factory, TARGET)
    decoding(bench, 40)
    learn(bench, slowness=5.0)
    bench.add("long", prompt=3000, max_tokens=1)
    assert bench.step().num_tokens == 40 + FLOOR


def test_with_nothing_to_decode_a_prompt_takes_the_whole_budget(bench_factory):
    bench = bench_of(bench_factory, TARGET)
    learn(bench, slowness=5.0)
    bench.add("long", prompt=3000, max_tokens=1)
    assert bench.step().num_tokens == 512


def test_before_anything_is_known_chunks_are_careful(bench_factory):
    bench = bench_of(bench_factory, TARGET)
    decoding(bench, 1)
    bench.add("long", prompt=3000, max_tokens=1)
    assert bench.step().num_tokens == 1 + FIRST


def test_chunks_and_what_cutting_costs_are_counted(bench_factory):
    sizer = ChunkSizer(512, TARGET)
    bench = bench_of(bench_factory, TARGET)
    measure(sizer.costs, 300, random.Random(0))
    bench.add("long", prompt=1100, max_tokens=1)
    for _ in range(3):
        sizer.ran(bench.step(), 0.3)
    assert (sizer.chunks_total, sizer.size, sizer.changes_total) == (3, 512, 1)
    assert sizer.overhead_seconds == pytest.approx(2 * 0.012, rel=0.3)


# How good the choice is: on-time answer tokens a second on simulated loads, against fixed sizes.

LOADS = {
    "chats and two long prompts": ((60, 8.0, 80, 60), (4, 6.0, 1500, 20)),
    "documents, short answers": ((24, 8.0, 1000, 24), (12, 8.0, 60, 60)),
    "long answers, a few prompts": ((16, 1.0, 40, 250), (6, 8.0, 1000, 20)),
}


def on_time(bench_factory, simulation, arrival, kinds, budget, target):
    rng = random.Random(3)
    arrivals = [
        arrival((i + rng.random()) * within / count, f"{k}-{i}", "tenant", prompt, output)
        for k, (count, within, prompt, output) in enumerate(kinds)
        for i in range(count)
    ]

    def cost(plan):
        chunks = sum(item.num_tokens for item in plan.scheduled if not item.decodes)
        decodes = sum(item.decodes for item in plan.scheduled)
        attended = sum(item.attended for item in plan.scheduled)
        return rng.uniform(0.95, 1.05) * seconds(decodes, chunks, attended)

    bench = bench_factory(
        token_budget=budget,
        max_running=64,
        max_model_len=4096,
        num_blocks=8192,
        block_size=16,
        itl_target=target,
    )
    served = simulation(bench, arrivals, cost=cost)
    count = sum(gap <= TARGET for gap in served.gaps) + sum(t <= 2 for t in served.first.values())
    return count / served.seconds


@pytest.mark.parametrize("kinds", LOADS.values(), ids=LOADS)
def test_adaptive_chunks_are_as_good_as_the_best_fixed_size(
    bench_factory, simulation, arrival, kinds
):
    shared = (bench_factory, simulation, arrival, kinds)
    fixed = {size: on_time(*shared, size, float("inf")) for size in (64, 128, 256, 512)}
    adaptive = on_time(*shared, 512, TARGET)
    print(fixed, adaptive)
    assert adaptive >= 0.95 * max(fixed.values())
    assert min(fixed.values()) < 0.9 * adaptive, "the load tells sizes apart"
