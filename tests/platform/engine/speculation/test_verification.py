"""Verification against decoding one token at a time: the same tokens, whatever is drafted.

The target is a chain over ten tokens: a row of logits by the last token.
"""

import itertools
import math

import numpy as np
import pytest

from polyloom.platform.engine.sampler import SampledToken, sample
from polyloom.platform.engine.speculation.verification import matched_tokens, verify
from polyloom.routing.sampling_params import SamplingParams

VOCABULARY = 10
TABLE = np.random.default_rng(3).normal(scale=1.2, size=(VOCABULARY, VOCABULARY))
TABLE = TABLE.astype(np.float32)
PROMPT = [4, 4, 1]
TRIALS = 10_000
SEEDS_OF_ALL = 200_000


def params(**options):
    return SamplingParams(**{"max_tokens": 50, "seed": 0, "temperature": 1.0, **options})


def verified(sampling, tokens, draft, constraint=None):
    logits = TABLE[[tokens[-1], *draft]]
    return verify(logits, sampling, tokens, len(PROMPT), draft, constraint)


def one_by_one(sampling, count):
    """The reference: decoding without drafts."""
    tokens, sampled = list(PROMPT), []
    while len(sampled) < min(count, sampling.max_tokens):
        sampled.append(sample(TABLE[tokens[-1]], sampling, tokens, len(PROMPT)))
        tokens.append(sampled[-1].token_id)
        if tokens[-1] in sampling.stop_token_ids:
            break
    return sampled


def argmax_draft(tokens, seed):
    first = int(TABLE[tokens[-1]].argmax())
    return [first, int(TABLE[first].argmax())]


def sampled_draft(tokens, seed):
    """Of the target's law, with noise of its own."""
    draft = []
    for _ in range(2):
        context = [*tokens, *draft]
        own = params(seed=seed + (1 << 40))
        draft.append(sample(TABLE[context[-1]], own, context, len(PROMPT)).token_id)
    return draft


def adversarial_draft(tokens, seed):
    """What will come, then what will hardly come."""
    first = sample(TABLE[tokens[-1]], params(seed=seed), tokens, len(PROMPT)).token_id
    return [first, int(TABLE[first].argmin())]


DRAFTS = [argmax_draft, sampled_draft, adversarial_draft]


def p_value(counts, law):
    """Chi-square by the Wilson-Hilferty approximation; cells below 5 are put together."""
    expected = law.ravel() * counts.sum()
    order = np.argsort(expected)
    small = order[np.cumsum(expected[order]) <= max(5.0, expected[expected < 5].sum())]
    large = np.setdiff1d(order, small)
    cells = [[cell] for cell in large] + ([small] if small.size else [])
    observed = np.array([counts.ravel()[cell].sum() for cell in cells])
    expected = np.array([expected[cell].sum() for cell in cells])
    freedom = len(expected) - 1
    statistic = ((observed - expected) ** 2 / expected).sum()
    z = (statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)
    return 0.5 * math.erfc(z / math.sqrt(2 / (9 * freedom)) / math.sqrt(2))


def filtered(row, top_k=VOCABULARY, top_p=1.0, min_p=0.0, logit_bias=None):
    """The law of one token after the filters, by their definitions."""
    for token, bias in (logit_bias or {}).items():
        row[token] += bias
    law = np.exp(row) / np.exp(row).sum()
    likeliest = np.sort(law)[::-1]
    law[law < likeliest[top_k - 1]] = 0.0
    before = np.array([law[law > p].sum() for p in law]) / law.sum()
    law[(before >= top_p) | (law < min_p * law.max())] = 0.0
    return law / law.sum()


def joint_law(**filters):
    """P of each triple of tokens after the prompt, `[10, 10, 10]`."""
    law = np.stack([filtered(row, **filters) for row in TABLE.astype(np.float64)])
    return law[PROMPT[-1]][:, None, None] * law[:, :, None] * law[None, :, :]


def triples(drafted, decide, trials, **filters):
    counts = np.zeros((VOCABULARY,) * 3)
    for seed in range(trials):
        tokens = list(PROMPT)
        while len(tokens) < len(PROMPT) + 3:
            tokens += decide(params(seed=seed, **filters), tokens, drafted(tokens, seed))
        counts[tuple(tokens[len(PROMPT) :][:3])] += 1
    return counts


def by_verification(sampling, tokens, draft):
    return [token.token_id for token in verified(sampling, tokens, draft).tokens]


def accept_too_much(sampling, tokens, draft):
    """A wrong rule: a draft is taken over where the target finds it likelier than not."""
    law = np.exp(TABLE[tokens[-1]]) / np.exp(TABLE[tokens[-1]]).sum()
    if law[draft[0]] > 0.2:
        return [draft[0]]
    return by_verification(sampling, tokens, draft)


@pytest.mark.parametrize("drafted", DRAFTS)
def test_three_tokens_follow_the_enumerated_joint_law(drafted):
    assert p_value(triples(drafted, by_verification, TRIALS), joint_law()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("drafted", DRAFTS)
def test_three_tokens_follow_the_enumerated_joint_law_in_many_samples(drafted):
    assert p_value(triples(drafted, by_verification, SEEDS_OF_ALL), joint_law()) > 1e-3


@pytest.mark.parametrize(
    "filters",
    [{"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"logit_bias": {3: 1.5, 4: -2.0}}],
    ids=str,
)
def test_three_tokens_follow_the_filtered_law(filters):
    """Drafts follow the unfiltered one, so many of them are refused."""
    counts = triples(sampled_draft, by_verification, TRIALS // 2, **filters)
    law = joint_law(**filters)
    assert counts[law == 0].sum() == 0
    assert p_value(counts[law > 0], law[law > 0]) > 1e-3


@pytest.mark.parametrize("drafted", [argmax_draft, sampled_draft])
def test_the_joint_law_notices_a_wrong_acceptance_rule(drafted):
    assert p_value(triples(drafted, accept_too_much, TRIALS // 2), joint_law()) < 1e-3


OPTIONS = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.6, "top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"presence_penalty": 1.5, "frequency_penalty": 0.3},
    {"repetition_penalty": 1.4},
    {"logit_bias": {3: 100.0}},
    {"logit_bias": {3: -100.0, 4: 2.0}},
    {"min_tokens": 5, "stop_token_ids": (2, 7)},
    {"stop_token_ids": (2, 5)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_any_draft_gives_what_decoding_one_by_one_gives(options, seed):
    """Tokens and logprobs, with right, wrong and half right drafts of all lengths."""
    sampling = params(seed=seed, max_tokens=12, logprobs=2, **options)
    wanted = one_by_one(sampling, 12)
    right = [token.token_id for token in wanted]
    rng = np.random.default_rng(seed)
    got = []
    while len(got) < len(wanted):
        tokens = PROMPT + right[: len(got)]
        draft = right[len(got) :][: rng.integers(0, 6)]
        wrong = int(rng.integers(0, 6))
        if wrong < len(draft):
            draft[wrong] = (draft[wrong] + 1) % VOCABULARY
        got += verified(sampling, tokens, draft).tokens
    assert got == wanted


def test_a_bias_of_100_is_emitted_at_every_position():
    sampling = params(logit_bias={3: 100.0})
    assert by_verification(sampling, PROMPT, [3, 3, 3]) == [3, 3, 3, 3]
    assert by_verification(sampling, PROMPT, [5, 3, 3]) == [3]


def test_a_drafted_token_counts_for_the_penalty_of_the_next():
    """Without it `a a a` would come; with it the second `a` sees the first."""
    a = 6
    logits = np.zeros((4, VOCABULARY), np.float32)
    logits[:, a] = 1.0
    free, penalised = params(temperature=0.0), params(temperature=0.0, presence_penalty=1.5)
    tokens = [verify(logits, p, PROMPT, 3, [a, a, a]).tokens for p in (free, penalised)]
    assert [t.token_id for t in tokens[0]] == [a, a, a, a]
    assert [t.token_id for t in tokens[1]] == [a, 0]


def test_nothing_comes_after_a_stop_token_inside_the_draft():
    right = [token.token_id for token in one_by_one(params(temperature=0.0), 5)]
    stop = right[2]
    out = by_verification(params(temperature=0.0, stop_token_ids=(stop,)), PROMPT, right[:4])
    assert out == right[: right.index(stop) + 1]


@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_no_more_than_max_tokens_come_out(max_tokens):
    right = [token.token_id for token in one_by_one(params(temperature=0.0), 6)]
    sampling = params(temperature=0.0, max_tokens=max_tokens)
    assert by_verification(sampling, PROMPT, right[:4]) == right[: min(max_tokens, 5)]


def test_an_error_after_accepted_tokens_keeps_them():
    right = [token.token_id for token in one_by_one(params(temperature=0.0), 2)]
    logits = TABLE[[PROMPT[-1], *right]]
    logits[1] = np.nan
    result = verify(logits, params(temperature=0.0), PROMPT, len(PROMPT), right)
    assert [token.token_id for token in result.tokens] == right[:1]
    assert "nan" in str(result.error)


class Cycle:
    """Allows 1 2 3 1 2 3 …, so many tokens of it."""

    def __init__(self, length):
        self.accepted, self._left = [], length

    @property
    def ended(self):
        return self._left == 0

    def allowed(self):
        mask = np.zeros(VOCABULARY, bool)
        mask[1 + len(self.accepted) % 3] = True
        return mask

    def accept(self, token_id):
        self.accepted.append(token_id)
        self._left -= 1


@pytest.mark.parametrize(
    ("draft", "length", "out"),
    [
        ([1, 2, 3, 1], 9, [1, 2, 3, 1, 2]),
        ([1, 2, 2, 1], 9, [1, 2, 3]),
        ([1, 2, 3, 1], 2, [1, 2]),
        ([1, 2, 3, 1], 4, [1, 2, 3, 1]),
    ],
)
def test_a_constraint_follows_what_comes_out_and_nothing_else(draft, length, out):
    constraint = Cycle(length)
    result = verified(params(), PROMPT, draft, constraint)
    assert [token.token_id for token in result.tokens] == out == constraint.accepted


def test_every_draft_of_two_tokens_gives_the_same_text():
    sampling = params(seed=11)
    right = [token.token_id for token in one_by_one(sampling, 3)]
    for draft in itertools.product(range(VOCABULARY), repeat=2):
        out = by_verification(sampling, PROMPT, list(draft))
        assert out == right[: len(out)]


@pytest.mark.parametrize(
    ("draft", "came", "matched"),
    [
        ((1, 2, 3), (1, 2, 9), 2),
        ((1, 2, 3), (1, 2, 3, 9), 3),
        ((1, 2, 3), (1, 2), 2),  # the second ended the text
        ((1, 2), (9,), 0),
        ((1, 2), (), 0),
    ],
)
def test_drafted_tokens_that_came_out_are_counted(
    draft: tuple[int, ...], came: tuple[int, ...], matched: int
) -> None:
    assert matched_tokens(draft, [SampledToken(token, None) for token in came]) == matched
