"""The sampler against the laws it claims: enumerated, chi-square, or exact."""

import itertools
import math

import numpy as np
import pytest

from polyloom.platform.engine.errors import SamplingError
from polyloom.platform.engine.noise import draw_key, exponentials
from polyloom.platform.engine.sampler import sample, token_logprob
from polyloom.routing.sampling_params import SamplingParams

DRAWS = 10_000
LOGITS = np.array([2.0, 1.5, 1.0, 0.7, 0.2, 0.0, -0.5, -1.0, -2.0, -4.0], dtype=np.float32)


def params(**options):
    return SamplingParams(**{"max_tokens": 10, "seed": 1, **options})


def softmax(logits):
    weights = np.exp(np.asarray(logits, dtype=np.float64) - np.max(logits))
    return weights / weights.sum()


def chi_square(counts, probabilities):
    """p-value by the Wilson-Hilferty approximation; cells of probability 0 must be empty."""
    counts, probabilities = np.asarray(counts, float), np.asarray(probabilities, float)
    assert counts[probabilities == 0].sum() == 0, "a token outside the law was drawn"
    used = probabilities > 0
    expected = probabilities[used] * counts.sum()
    statistic = ((counts[used] - expected) ** 2 / expected).sum()
    freedom = used.sum() - 1
    if freedom == 0:
        return 1.0
    z = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))
    return 0.5 * math.erfc(z / math.sqrt(2))


def draw(logits, **options):
    """Counts over DRAWS seeds."""
    counts = np.zeros(len(logits), dtype=int)
    for seed in range(DRAWS):
        counts[sample(logits, params(seed=seed, **options), [1, 2], 2).token_id] += 1
    return counts


def filtered_law(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The definition, token by token."""
    law = softmax(np.asarray(logits, dtype=np.float64) / temperature)
    order = list(np.argsort(-law, kind="stable"))
    kept = order[: top_k or None]
    total, cumulative, nucleus = law[kept].sum(), 0.0, []
    for token in kept:
        if nucleus and cumulative >= top_p * total:
            break
        nucleus.append(token)
        cumulative += law[token]
    kept = [token for token in nucleus if law[token] >= min_p * law.max()]
    result = np.zeros_like(law)
    result[kept] = law[kept] / law[kept].sum()
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"top_p": 0.0},
        {"min_p": 0.2},
        {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_law(options):
    assert chi_square(draw(LOGITS, **options), filtered_law(LOGITS, **options)) > 1e-3


def test_the_chi_square_notices_a_wrong_law():
    law = filtered_law(LOGITS, temperature=1.1)
    assert chi_square(draw(LOGITS), law) < 1e-3


def test_three_tokens_follow_the_enumerated_joint_law():
    """Positions of one seed are independent: a law that depends on the previous token keeps its
    joint distribution."""
    rng = np.random.default_rng(0)
    table = rng.standard_normal((4, 4)).astype(np.float32)
    counts = np.zeros((4, 4, 4), dtype=int)
    for seed in range(DRAWS):
        tokens = [0]
        for _ in range(3):
            tokens.append(sample(table[tokens[-1]], params(seed=seed), tokens, 1).token_id)
        counts[tuple(tokens[1:])] += 1
    joint = np.zeros((4, 4, 4))
    for a, b, c in itertools.product(range(4), repeat=3):
        joint[a, b, c] = softmax(table[0])[a] * softmax(table[a])[b] * softmax(table[b])[c]
    assert chi_square(counts.ravel(), joint.ravel()) > 1e-3


def test_choices_of_one_seed_are_independent():
    counts = np.zeros((10, 10), dtype=int)
    for seed in range(DRAWS):
        pair = [sample(LOGITS, params(seed=seed, choice=c), [1], 1).token_id for c in (0, 1)]
        counts[tuple(pair)] += 1
    law = softmax(LOGITS)
    merged = [0, 1, 2, 3, 4]  # enough mass in every cell for the approximation
    inside = counts[np.ix_(merged, merged)]
    joint = np.outer(law, law)[np.ix_(merged, merged)]
    assert chi_square(inside.ravel(), (joint / joint.sum()).ravel()) > 1e-3


def test_noise_of_a_large_vocabulary_is_exponential_and_uncorrelated():
    ids = np.arange(200_000, dtype=np.uint32)
    first, second = (exponentials(draw_key(7, 0, position), ids) for position in (0, 1))
    edges = -np.log1p(-np.linspace(0, 1, 65)[:-1])
    counts, _ = np.histogram(first, [*edges, np.inf])
    assert chi_square(counts, np.full(64, 1 / 64)) > 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.01
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.01
    assert first.min() > 0 and np.isfinite(first).all()


def test_every_bit_of_a_key_matters_and_no_key_shifts_another_stream():
    ids = np.arange(50_000, dtype=np.uint32)
    key = draw_key(7, 0, 0)
    stream = exponentials(key, ids)
    for bit in range(64):
        other = exponentials(key ^ (1 << bit), ids)
        assert abs(np.corrcoef(stream, other)[0, 1]) < 0.02, f"bit {bit}"
    for flipped in (0x5A5A5A5A, 1, 0x10000, 0x80000000):
        high = (key >> 32) ^ flipped
        moved = (high << 32) | ((key + 3 * 0x9E3779B1) & 0xFFFFFFFF)  # begins 3 ids further on
        assert abs(np.corrcoef(stream[3:], exponentials(moved, ids)[:-3])[0, 1]) < 0.02


def test_equal_inputs_give_equal_tokens_and_any_key_part_changes_them():
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(5000).astype(np.float32)
    base = params(seed=3)

    def token(sampling, tokens):
        return sample(logits, sampling, tokens, 1).token_id

    assert token(base, [5]) == token(base, [9])  # what the prompt is does not matter
    others = [
        token(params(seed=4), [5]),
        token(params(seed=3 + 2**40), [5]),
        token(params(seed=3, choice=1), [5]),
        token(base, [5, 6]),
    ]
    assert token(base, [5]) not in others


def test_the_nucleus_of_a_large_vocabulary_equals_the_definition():
    rng = np.random.default_rng(2)
    for spread in (0.1, 1.0, 5.0):
        logits = (rng.standard_normal(20_000) * spread).astype(np.float32)
        law = filtered_law(logits, top_p=0.9)
        top = sample(
            logits, params(top_p=0.9, logprobs=20_000, logprobs_mode="processed"), [1], 1
        ).logprob.top
        kept = {entry.token_id for entry in top}
        wanted = set(np.flatnonzero(law))
        assert len(kept ^ wanted) <= 1  # the one at the edge may fall to rounding
        for entry in top[:50]:
            assert entry.logprob == pytest.approx(math.log(law[entry.token_id]), abs=1e-3)


def test_greedy_takes_the_best_and_the_first_of_equals():
    assert sample(LOGITS, params(temperature=0.0), [1], 1).token_id == 0
    assert sample(LOGITS[::-1].copy(), params(temperature=0.0), [1], 1).token_id == 9
    assert sample(np.zeros(5, np.float32), params(temperature=0.0), [1], 1).token_id == 0


def test_a_tiny_temperature_is_greedy_without_overflow():
    assert sample(LOGITS, params(temperature=1e-30), [1], 1).token_id == 0


def greedy(logits, tokens, prompt_len, **options):
    return sample(logits, params(temperature=0.0, **options), tokens, prompt_len).token_id


def test_repetition_penalty_covers_prompt_and_output_in_both_signs():
    logits = np.array([4.0, 3.0, 2.5], dtype=np.float32)
    assert greedy(logits, [0], 1, repetition_penalty=1.5) == 1
    assert greedy(logits, [0, 1], 1, repetition_penalty=1.5) == 0
    assert greedy(logits, [0, 1], 1, repetition_penalty=2.0) == 2
    negative = np.array([-1.0, -1.5], dtype=np.float32)
    assert greedy(negative, [0], 1, repetition_penalty=2.0) == 1


def test_presence_and_frequency_penalties_cover_the_output_alone():
    logits = np.array([1.0, 0.5, 0.0], dtype=np.float32)
    assert greedy(logits, [0, 0], 2, presence_penalty=2.0) == 0
    assert greedy(logits, [0, 0], 1, presence_penalty=2.0) == 1
    assert greedy(logits, [2, 0, 0, 1], 1, frequency_penalty=0.2) == 0
    assert greedy(logits, [2, 0, 0, 0, 1], 1, frequency_penalty=0.4) == 1


def test_logit_bias_forces_and_bans():
    assert greedy(LOGITS, [1], 1, logit_bias={9: 100.0}) == 9
    counts = draw(LOGITS, logit_bias={9: 100.0})
    assert counts[9] == DRAWS
    banned = LOGITS.copy()
    banned[0] = -np.inf
    assert chi_square(draw(LOGITS, logit_bias={0: -1e9}), softmax(banned)) > 1e-3


def test_min_tokens_masks_stop_ids_until_there_are_enough():
    options = {"min_tokens": 2, "stop_token_ids": (0, 1)}
    assert greedy(LOGITS, [5], 1, **options) == 2
    assert greedy(LOGITS, [5, 5], 1, **options) == 2
    assert greedy(LOGITS, [5, 5, 5], 1, **options) == 0


def test_logits_are_never_changed():
    before = LOGITS.copy()
    sample(
        LOGITS,
        params(repetition_penalty=2.0, presence_penalty=1.0, logit_bias={1: 2.0}, top_p=0.5),
        [0, 1],
        1,
    )
    assert np.array_equal(LOGITS, before)


def test_raw_logprobs_ignore_what_processing_does():
    sampled = sample(
        LOGITS, params(temperature=0.3, top_k=2, logit_bias={0: -50.0}, logprobs=2), [1], 1
    )
    expected = np.log(softmax(LOGITS))
    assert sampled.logprob.logprob == pytest.approx(expected[sampled.token_id], abs=1e-5)
    assert [entry.token_id for entry in sampled.logprob.top] == [0, 1]
    assert sampled.logprob.top[0].logprob == pytest.approx(expected[0], abs=1e-5)


def test_processed_logprobs_are_of_the_law_that_was_drawn_from():
    options = {"temperature": 0.7, "top_k": 3}
    sampled = sample(LOGITS, params(**options, logprobs=10, logprobs_mode="processed"), [1], 1)
    law = filtered_law(LOGITS, **options)
    assert sampled.logprob.logprob == pytest.approx(np.log(law[sampled.token_id]), abs=1e-5)
    assert {e.token_id: pytest.approx(e.logprob, abs=1e-5) for e in sampled.logprob.top} == {
        t: np.log(law[t]) for t in (0, 1, 2)
    }


def test_no_alternatives_and_no_logprobs_are_different():
    assert sample(LOGITS, params(), [1], 1).logprob is None
    assert sample(LOGITS, params(logprobs=0), [1], 1).logprob.top == ()


def test_token_logprob_survives_large_logits():
    entry = token_logprob(np.array([1e4, 0.0, -np.inf], np.float32), 1, 3)
    assert entry.logprob == pytest.approx(-1e4)
    assert [e.token_id for e in entry.top] == [0, 1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_not_a_token(bad, temperature):
    logits = LOGITS.copy()
    logits[3] = bad
    with pytest.raises(SamplingError, match=str(bad)):
        sample(logits, params(temperature=temperature), [1], 1)


def test_nothing_left_to_choose_is_an_error():
    with pytest.raises(SamplingError):
        sample(np.full(4, -np.inf, np.float32), params(), [1], 1)


@pytest.mark.parametrize("temperature", [1e-38, 1e-39, 1e-45, 1e-300, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"min_p": 0.5}, {"top_k": 3}])
def test_the_smallest_temperatures_choose_the_best(temperature, filters):
    """Their inverses are beyond fp32, and a NaN would fail the step of everybody in it."""
    with np.errstate(invalid="raise"):
        chosen = sample(LOGITS[::-1], params(temperature=temperature, **filters), [1, 2], 2)
    assert chosen.token_id == LOGITS.size - 1
