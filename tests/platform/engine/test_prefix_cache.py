"""The engine with warm prefix caches: the same answers as without, and never another's."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from polyloom.kvcache.prefix_index import CachedBlock
from polyloom.platform.engine import prefix
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.messages import CacheMiss, Invalidate, NamespaceCounters
from polyloom.platform.engine.step import Engine
from polyloom.routing.request import CacheOwner, CacheScope

BLOCK = 16
BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4
MINE, YOURS = CacheOwner("tenant", "mine"), CacheOwner("tenant", "yours")
NEAR_TIE = 1e-4


def scope(owner: CacheOwner = MINE, **fields: str) -> CacheScope:
    return CacheScope(owner=owner, **{"tokenizer_digest": "sha256:tokenizer", **fields})


def words(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(t) for t in np.random.default_rng(seed).integers(3, 512, length))


def assert_same(warm: Sequence, cold: Sequence) -> None:
    """Same tokens with the same logprobs: other shapes of the same sums may only differ in ties."""
    for mine, other in zip(warm, cold, strict=True):
        assert mine.token_ids == other.token_ids
        for a, b in zip(mine.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=NEAR_TIE)


def counters(engine: Engine, owner: CacheOwner = MINE, adapter: str | None = None):
    found = [
        group
        for group in engine.cache_report().namespaces
        if (group.owner, group.adapter_digest) == (owner, adapter)
    ]
    return found[0] if found else None


def cached_blocks(engine: Engine) -> list[CachedBlock]:
    return list(engine._prefix_cache._cache.index)


@pytest.fixture(scope="module")
def cold(settings_factory):
    """An engine that reuses nothing."""
    engine = build_engine(settings_factory(prefix_cache=False))
    yield engine
    engine.close()


def test_a_repeated_prompt_runs_only_what_no_block_holds(
    engine_factory, cold, request_factory, run
):
    engine = engine_factory()
    for length in (16, 17, 31, 32, 33, 50, 100):
        prompt, ran = words(length, seed=length), engine.counters.prompt_tokens
        first, again = (
            run(engine, [request_factory(prompt, cache=scope(), logprobs=0)])[0] for _ in range(2)
        )
        computed = length + 7  # the last of 8 tokens is not
        cached = min(length - 1, computed // BLOCK * BLOCK)
        assert (first.end.cached_tokens, again.end.cached_tokens) == (0, cached)
        assert engine.counters.prompt_tokens - ran == 2 * length - cached
        assert_same([first, again], run(cold, [request_factory(prompt, logprobs=0)]) * 2)


def test_of_prompts_that_come_at_once_the_common_part_runs_once(
    engine_factory, cold, request_factory, run
):
    engine, prompt = engine_factory(token_budget=128), words(100)
    prompts = [prompt, prompt, (*prompt[:90], *words(5, 1))]
    answers = run(engine, [request_factory(p, cache=scope(), logprobs=0) for p in prompts])
    assert [a.end.cached_tokens for a in answers] == [0, 99 // BLOCK * BLOCK, 90]
    assert engine.counters.prompt_tokens == sum(map(len, prompts)) - 96 - 90
    assert_same(answers, run(cold, [request_factory(p, logprobs=0) for p in prompts]))


@pytest.mark.parametrize("implementation", ["reference", "auto"])
def test_the_start_of_a_block_is_copied(engine_factory, cold, request_factory, run, implementation):
    engine, prompt = engine_factory(implementation=implementation), words(70)
    other = (*prompt[:41], *words(20, seed=9))
    run(engine, [request_factory(prompt, cache=scope())])
    (warm,) = run(engine, [request_factory(other, cache=scope(), logprobs=0)])
    assert warm.end.cached_tokens == 41
    assert_same([warm], run(cold, [request_factory(other, logprobs=0)]))
    (again,) = run(engine, [request_factory(prompt, cache=scope(), logprobs=0)])
    assert_same([again], run(cold, [request_factory(prompt, logprobs=0)]))


def test_the_next_turn_reuses_what_was_generated(engine_factory, cold, request_factory, run):
    engine, prompt = engine_factory(), words(20)
    (first,) = run(engine, [request_factory(prompt, cache=scope(), max_tokens=40)])
    turn = (*prompt, *first.token_ids, *words(9, seed=1))
    (second,) = run(engine, [request_factory(turn, cache=scope(), logprobs=0)])
    assert second.end.cached_tokens == 48  # of the 59 whose K and V were computed
    assert second.end.cache.eligible == 64
    assert_same([second], run(cold, [request_factory(turn, logprobs=0)]))


def test_a_mix_of_revisions_on_one_prompt_is_warm_for_each_and_mixed_up_for_none(
    engine_factory, cold, request_factory, run, adapter_factory
):
    sources = [None, *(adapter_factory(rank, seed) for seed, rank in enumerate((1, 8, 20)))]
    engine, prompt = engine_factory(), words(50)
    wanted = run(cold, [request_factory(prompt, adapter=a, logprobs=0) for a in sources])
    assert len({tuple(answer.token_ids) for answer in wanted}) == len(sources)
    for cached in (0, 48):
        requests = [
            request_factory(prompt, adapter=source, cache=scope(), logprobs=0) for source in sources
        ]
        answers = run(engine, requests[::-1])[::-1]
        assert [answer.end.cached_tokens for answer in answers] == [cached] * len(sources)
        assert_same(answers, wanted)
    report = engine.cache_report()
    assert len(report.namespaces) == len(sources)
    assert (report.cross_namespace_hits, report.checked_hits) == (0, 3 * len(sources))


def test_without_the_revision_in_the_key_an_answer_is_wrong(
    engine_factory, request_factory, run, adapter_factory, monkeypatch
):
    """What the tests above would see if isolation failed."""
    source, prompt, engine = adapter_factory(8, 3), words(50), engine_factory()
    (alone,) = run(engine, [request_factory(prompt, logprobs=0)])
    monkeypatch.setattr(prefix, "namespace", _without_revision(prefix.namespace))
    run(engine, [request_factory(prompt, adapter=source, cache=scope())])
    (fouled,) = run(engine, [request_factory(prompt, cache=scope(), logprobs=0)])
    assert fouled.end.cached_tokens == 48
    assert abs(fouled.logprobs[0].logprob - alone.logprobs[0].logprob) > 100 * NEAR_TIE


def _without_revision(namespace):
    def made(request, scope, kv_dtype):
        return dataclasses.replace(namespace(request, scope, kv_dtype), adapter_digest=None)

    return made


@pytest.mark.parametrize(("targets", "first_apart"), [("all-linear", 0), (["q_proj"], 1)])
def test_base_blocks_cannot_serve_an_adapter(
    engine_factory, request_factory, run, adapter_factory, targets, first_apart
):
    """An adapter on k or v writes other K and V at once; one on q alone changes what the first
    layer passes on, so from the second layer on they differ all the same."""
    engine = engine_factory()
    source = adapter_factory(8, 5, targets)
    for adapter in (None, source):
        run(engine, [request_factory(words(16), adapter=adapter, cache=scope(), max_tokens=1)])
    blocks = {node.epoch.namespace.adapter_digest: node.block for node in cached_blocks(engine)}
    storage = engine._runner._attention._storage
    for tensor in (storage.keys, storage.values):
        apart = (tensor[:, blocks[None]] - tensor[:, blocks[source.digest]]).abs().amax((1, 2, 3))
        assert apart[:first_apart].max() == 0 if first_apart else True
        assert apart[first_apart:].min() > 1e-3


def test_nothing_is_reused_across_namespaces(engine_factory, request_factory, run):
    engine = engine_factory()
    run(engine, [request_factory(words(40), cache=scope())])
    others = [
        {"cache": scope(YOURS)},
        {"cache": scope(CacheOwner("group", "mine"))},
        {"cache": scope(salt="")},
        {"cache": scope(salt="sha256:template")},
        {"cache": scope(tool_schema_digest="sha256:tools")},
        {"cache": scope(tokenizer_digest="sha256:other")},
        {"cache": scope(), "template": "sha256:other"},
        {"cache": None},
    ]
    for other in others:
        (answer,) = run(engine, [request_factory(words(40), **other)])
        assert answer.end.cached_tokens == 0
        assert (answer.end.cache is None) == (other["cache"] is None)
    (answer,) = run(engine, [request_factory(words(40), cache=scope())])
    assert answer.end.cached_tokens == 32


@pytest.mark.slow
def test_preempted_and_evicted_sequences_answer_as_cold_ones(
    engine_factory, cold, request_factory, run
):
    """Nine blocks for prompts and answers of far more: every mechanism at once."""
    engine = engine_factory(kv_memory=BLOCK_BYTES * 9)
    shared = words(20)
    prompts = [(*shared, *words(n, seed=n)) for n in (1, 9, 14, 30, 41, 60)]
    wanted = run(cold, [request_factory(p, max_tokens=30, logprobs=0) for p in prompts])
    preemptions = cached = 0
    for _ in range(2):
        requests = [request_factory(p, max_tokens=30, logprobs=0, cache=scope()) for p in prompts]
        answers = run(engine, requests)
        assert_same(answers, wanted)
        preemptions += sum(answer.end.timings.preemptions for answer in answers)
        cached += sum(answer.end.cached_tokens for answer in answers)
    assert preemptions > 0
    assert cached > 0
    assert counters(engine).evictions > 0


def test_prompt_logprobs_are_computed_and_not_skipped(engine_factory, cold, request_factory, run):
    engine, prompt = engine_factory(), words(50)
    run(engine, [request_factory(prompt, cache=scope())])
    (answer,) = run(engine, [request_factory(prompt, cache=scope(), prompt_logprobs=1)])
    (wanted,) = run(cold, [request_factory(prompt, prompt_logprobs=1)])
    assert answer.end.cache.eligible == answer.end.cached_tokens == 0
    assert [e.token_id for e in answer.prompt_logprobs] == list(prompt)
    for mine, other in zip(answer.prompt_logprobs[1:], wanted.prompt_logprobs[1:], strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=NEAR_TIE)


def test_an_invalidation_ends_reuse_at_once_also_of_what_still_runs(
    engine_factory, cold, request_factory, run
):
    engine, prompt = engine_factory(), words(40)
    run(
        engine,
        [request_factory(prompt, cache=scope()), request_factory(prompt, cache=scope(YOURS))],
    )
    request = request_factory((*prompt, 7), cache=scope(), max_tokens=20, logprobs=0)
    assert engine.submit(request) is None
    events = engine.step()
    engine.invalidate(Invalidate(cause="operator", owner=MINE))
    assert {node.epoch.namespace.owner_name for node in cached_blocks(engine)} == {"yours"}
    while engine.has_work:
        events += engine.step()
    assert counters(engine).blocks == 0
    assert counters(engine).invalidations == {"operator": 2}
    (wanted,) = run(cold, [request_factory((*prompt, 7), max_tokens=20, logprobs=0)])
    assert [t for event in events[:-1] for t in event.token_ids] == wanted.token_ids
    assert events[-1].cached_tokens == 32
    (again,) = run(engine, [request_factory(prompt, cache=scope())])
    assert (again.end.cached_tokens, again.end.cache.miss.reason) == (0, "invalidated")


def test_a_retired_revision_takes_its_blocks_along_and_comes_back_cold(
    engine_factory, request_factory, run, adapter_factory
):
    engine, prompt, source = engine_factory(), words(40), adapter_factory(4, 1)
    requests = [request_factory(prompt, adapter=a, cache=scope()) for a in (source, None)]
    first = run(engine, requests)
    engine.retire(source.digest)
    assert counters(engine, adapter=source.digest).invalidations == {"revision_retired": 2}
    assert counters(engine).blocks == 2
    again = [request_factory(prompt, adapter=a, cache=scope()) for a in (source, None)]
    answers = run(engine, again)
    assert [a.end.cached_tokens for a in answers] == [0, 32]
    assert [a.token_ids for a in answers] == [a.token_ids for a in first]


def test_a_held_prefix_outlives_pressure_and_its_release_does_not(
    engine_factory, request_factory, run
):
    engine = engine_factory(kv_memory=BLOCK_BYTES * 20, max_model_len=128)
    system = words(64)
    (warmed,) = run(engine, [request_factory(system, cache=scope(), hold="system", max_tokens=0)])
    assert engine.cache_report().holds == ("system",)
    group = counters(engine)
    assert group.held_blocks == 4
    assert (warmed.end.cache, group.eligible, group.misses) == (None, 0, {})  # nobody's request
    assert engine.status().blocks_free == 16

    def pressure():
        for seed in range(1, 6):
            run(engine, [request_factory(words(100, seed), cache=scope(YOURS), max_tokens=1)])

    pressure()
    (answer,) = run(engine, [request_factory((*system, 5), cache=scope())])
    assert answer.end.cached_tokens == 64
    assert (counters(engine).eligible, counters(engine).hits) == (1, 1)
    engine.release_prefix("system")
    engine.release_prefix("system")  # as good as once
    assert (engine.cache_report().holds, counters(engine).held_blocks) == ((), 0)
    pressure()
    (answer,) = run(engine, [request_factory((*system, 5), cache=scope())])
    assert answer.end.cached_tokens < 64
    assert answer.end.cache.miss == CacheMiss("evicted")


def test_what_cannot_be_held_is_refused(engine_factory, request_factory):
    engine = engine_factory(kv_memory=BLOCK_BYTES * 20, max_model_len=128)
    prompt = words(100)
    assert engine.submit(request_factory(prompt, cache=scope(), hold="one")) is None
    refused = engine.submit(request_factory(prompt, cache=scope(), hold="two"))
    assert refused.code == "invalid_request"
    assert "6 blocks asked for, 6 held already, 10 may be held" in refused.message
    alone = engine.submit(request_factory(prompt, hold="two"))
    assert "shares no blocks" in alone.message
    off = engine_factory(prefix_cache=False)
    assert "is off" in off.submit(request_factory(prompt, cache=scope(), hold="x")).message
    while engine.has_work:
        engine.step()
    assert engine.cache_report().holds == ("one",)
    engine.check_idle()


def test_the_report_counts_what_the_answers_said(engine_factory, request_factory, run):
    engine, prompt = engine_factory(), words(50)
    requests = [prompt, prompt, (*prompt[:20], *words(30, 1)), words(50, 2), words(5, 3)]
    ends = [run(engine, [request_factory(p, cache=scope())])[0].end for p in requests]
    group = counters(engine)
    assert isinstance(group, NamespaceCounters)
    assert [e.cached_tokens for e in ends] == [0, 48, 20, 0, 0]
    assert (group.eligible, group.hits) == (4, 2)
    assert group.tokens_reused == 68
    assert group.bytes_reused == sum(e.cache.bytes for e in ends) == 68 * BLOCK_BYTES // BLOCK
    assert group.saved == pytest.approx(sum(e.cache.saved for e in ends))
    assert ends[1].cache.saved > 0
    assert [e.cache.miss and e.cache.miss.reason for e in ends] == [
        "first",
        None,
        "tokens",
        "first",
        None,
    ]
    assert group.misses == {"first": 2, "tokens": 1}
    miss = ends[2].cache.miss
    assert (miss.position, miss.before) == (20, prompt[4:20])
    assert (miss.expected, miss.found) == (prompt[20:36], requests[2][20:36])
    lever = {c.name: c for c in engine.capabilities()}["prefix_cache"]
    assert (lever.implementation, lever.engaged) == ("on", 2)


def test_what_is_hot_names_the_chains_of_later_prompts(engine_factory, request_factory, run):
    engine, prompt = engine_factory(), words(50)
    request = request_factory(prompt, cache=scope())
    run(engine, [request])
    chain = prefix.prompt_chain(request, "float32", BLOCK)
    hot = {h.block_hash: h.num_tokens for h in engine.cache_report().hot}
    assert len(chain) == 3
    assert hot == {chain[-1]: 48}
    branched = request_factory((*prompt[:32], *words(16, 1)), cache=scope())
    run(engine, [branched])
    hot = {h.block_hash: h.num_tokens for h in engine.cache_report().hot}
    assert hot == {chain[1]: 32, chain[2]: 48, prefix.prompt_chain(branched, "float32", 16)[2]: 48}
    assert prefix.prompt_chain(request_factory(prompt), "float32", BLOCK) == ()


def test_a_block_under_another_root_is_counted_and_refused(
    engine_factory, cold, request_factory, run
):
    """The self-check behind the counter: a planted collision of hashes serves nothing."""
    engine, prompt = engine_factory(), words(40)
    run(engine, [request_factory(prompt, cache=scope(YOURS))])
    mine = prefix.prompt_chain(request_factory(prompt, cache=scope()), "float32", BLOCK)
    index = engine._prefix_cache._cache.index
    planted = next(node for node in index if node.end == BLOCK)
    index._by_hash[bytes.fromhex(mine[0])] = planted
    request = request_factory(prompt, cache=scope(), logprobs=0, max_tokens=0)
    assert engine.submit(request) is None
    (finished,) = engine.step()
    assert finished.cached_tokens == 0
    assert engine.cache_report().cross_namespace_hits == 1
