"""The engine with warm prefix caches: the same answers as without, and never another's."""

from collections.abc import Sequence

import numpy as np
import pytest

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


@pytest.fixture
def cold(engine_factory):
    """An engine that reuses nothing."""
    return engine_factory(prefix_cache=False)


@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 50, 100])
def test_a_repeated_prompt_runs_only_what_no_block_holds(
    engine_factory, cold, request_factory, run, length
):
    engine, prompt = engine_factory(), words(length)
    first, again = (
        run(engine, [request_factory(prompt, cache=scope(), logprobs=0)])[0] for _ in range(2)
    )
    computed = length + 7  # the last of 8 tokens is not
    cached = min(length - 1, computed // BLOCK * BLOCK)
    assert (first.end.cached_tokens, again.end.cached_tokens) == (0, cached)
    assert engine.counters.prompt_tokens == 2 * length - cached
    assert_same([first, again], run(cold, [request_factory(prompt, logprobs=0)]) * 2)


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
