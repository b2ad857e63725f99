"""Who gets the engine's tokens: simulated loads with a step-cost model, and no model."""

import random
import statistics
from dataclasses import replace

import pytest


def jain(amounts):
    return sum(amounts) ** 2 / (len(amounts) * sum(amount**2 for amount in amounts))


def p95(values):
    return statistics.quantiles(values, n=20)[-1]


def engine(bench_factory, fake_adapters, **options):
    """The default limits of a CPU, on memory for 256 k tokens."""
    shape = {
        "token_budget": 512,
        "max_running": 64,
        "queue_limit": 10_000,
        "max_model_len": 4096,
        "num_blocks": 16384,
        "block_size": 16,
        "adapters": fake_adapters(capacity=32),
        "itl_target": 0.1,
    }
    return bench_factory(**shape | options)


def backlog(arrival, tenant, adapters=(None,), *, count=400, seed=0, weight=1.0, scale=1):
    """`count` requests at once, the adapters in turn."""
    rng = random.Random(f"{tenant}{seed}")
    return [
        arrival(
            0.0,
            f"{tenant}{i}",
            tenant,
            scale * rng.randint(20, 300),
            scale * rng.randint(10, 200),
            adapters[i % len(adapters)],
            weight,
        )
        for i in range(count)
    ]


def test_a_tenant_with_twenty_adapters_gets_one_share(
    bench_factory, fake_adapters, simulation, arrival
):
    def served(tenants):
        loads = [
            *backlog(arrival, tenants[0], [f"a{i}" for i in range(20)]),
            *backlog(arrival, tenants[1], ["b"]),
            *backlog(arrival, tenants[2], ["c"]),
            *backlog(arrival, tenants[3]),
        ]
        bench = engine(bench_factory, fake_adapters)
        return simulation(bench, loads, until=20.0)

    names = ("many", "one", "other", "base")
    fair = served(names).tokens
    assert sum(fair.values()) > 10_000
    assert jain([fair[name] for name in names]) >= 0.99


def test_shares_follow_weights(bench_factory, fake_adapters, simulation, arrival):
    loads = [
        *backlog(arrival, "double", weight=2.0, count=800),
        *backlog(arrival, "single"),
        *backlog(arrival, "half", weight=0.5),
    ]
    tokens = simulation(engine(bench_factory, fake_adapters), loads, until=20.0).tokens
    assert tokens["double"] / tokens["single"] == pytest.approx(2, rel=0.1)
    assert tokens["single"] / tokens["half"] == pytest.approx(2, rel=0.1)


def modest(arrival, tenant, until, seed):
    """A request every half second on average, at random moments."""
    rng, now, requests = random.Random(f"{tenant}{seed}"), 1.0, []
    while (now := now + rng.expovariate(2)) < until:
        name = f"{tenant}{len(requests)}"
        requests.append(arrival(now, name, tenant, rng.randint(30, 60), rng.randint(5, 20)))
    return requests


FLOODS = {
    "long prompts": {"scale": 3},
    "short of blocks": {"scale": 3, "blocks": 2048},
    "all places taken": {"prompt": 16, "output": 1000},
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_the_modest_do_not_notice_a_flood(bench_factory, fake_adapters, simulation, arrival, flood):
    until = 25.0
    few = [r for name in ("a", "b", "c") for r in modest(arrival, name, until, 1)]
    asked = {r.name for r in few if r.time < until - 2}
    many = backlog(arrival, "flood", count=2000, scale=flood.get("scale", 1))
    if "output" in flood:
        many = [replace(r, prompt=flood["prompt"], max_tokens=flood["output"]) for r in many]

    def load(requests):
        blocks = flood.get("blocks", 16384)
        return simulation(engine(bench_factory, fake_adapters, num_blocks=blocks), requests, until)

    alone, loaded = load(few), load([*many, *few])
    answered = asked & loaded.finished
    assert len(answered) >= 0.95 * len(asked)
    bound = p95(alone.first.values()) + 2 * statistics.mean(loaded.steps)
    assert p95([loaded.first[name] for name in answered]) <= bound
    assert loaded.tokens["flood"] > 5 * loaded.tokens["a"], "the flood uses what is left"

    in_one_line = load([replace(r, tenant="everyone") for r in [*many, *few]])
    answered = asked & in_one_line.finished
    late = [in_one_line.first[name] for name in answered]
    assert len(answered) < 0.95 * len(asked) or p95(late) > bound, "the measure tells"
