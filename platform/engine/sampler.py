"""The next token as a pure function of (logits, parameters, what came before).

A row is sampled by itself, so its token cannot depend on the batch it shares a step with; what a
row does not ask for, it does not pay for. Logits are one row on the host: `[V]` fp32.

Order: repetition penalty (over prompt and output), presence and frequency penalties (over the
output), logit_bias, min_tokens mask of the stop ids, mask of what a structure allows; at temperature
0 the best token; else temperature, top-k, top-p, min-p and the Gumbel-max choice among what is
kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyloom.platform.engine.errors import SamplingError
from polyloom.platform.engine.messages import TokenLogprob, TopLogprob
from polyloom.platform.engine.noise import draw_key, exponentials
from polyloom.routing.sampling_params import SamplingParams

Row = NDArray[np.float32]
TokenIds = NDArray[np.uint32]
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token, and its logprob where the parameters ask for one."""

    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class _Law:
    """The distribution that a token is drawn from: `weights[i]` for `token_ids[i]`, not normalised.

    token_ids is None when all of the vocabulary is kept.
    """

    weights: Row
    token_ids: TokenIds | None


def sample(
    logits: Row,
    params: SamplingParams,
    tokens: Sequence[int],
    prompt_len: int,
    allowed: NDArray[np.bool_] | None = None,
) -> SampledToken:
    """Choose the token that follows `tokens`, of which the first `prompt_len` are the prompt.

    allowed: `[V]`, tokens that may be chosen; None for all.

    Raises:
        SamplingError: the logits have a NaN or +inf, or leave no token.
    """
    processed = _penalised(logits, params, tokens, prompt_len)
    if allowed is not None:
        processed = np.where(allowed, processed, np.float32(-np.inf))
    best = int(processed.argmax())
    if not np.isfinite(processed[best]):
        raise SamplingError(f"the best logit is {processed[best]}")
    if params.temperature == 0.0:
        return SampledToken(best, _greedy_logprob(logits, processed, best, params))
    law = _law(processed, processed[best], params)
    key = draw_key(params.seed, params.choice, len(tokens) - prompt_len)
    chosen = _choose(law, key)
    return SampledToken(chosen, _sampled_logprob(logits, law, chosen, params))


def token_logprob(logits: Row, token_id: int, alternatives: int) -> TokenLogprob:
    """Log-softmax of `logits` at `token_id`, and the `alternatives` best tokens."""
    logprobs = logits - logits.max()
    logprobs -= np.log(np.exp(logprobs).sum(dtype=np.float64))
    return TokenLogprob(token_id, float(logprobs[token_id]), _top(logprobs, None, alternatives))


def _penalised(logits: Row, params: SamplingParams, tokens: Sequence[int], prompt_len: int) -> Row:
    """Logits after penalties, bias and mask; the input itself where there are none."""
    output_len = len(tokens) - prompt_len
    repetition = params.repetition_penalty != 1.0
    presence = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    masked = output_len < params.min_tokens and bool(params.stop_token_ids)
    if not (repetition or (presence and output_len) or params.logit_bias or masked):
        return logits
    logits = logits.copy()
    if repetition:
        seen = np.unique(np.asarray(tokens, dtype=np.int64))
        values = logits[seen]
        factor = np.float32(params.repetition_penalty)
        logits[seen] = np.where(values > 0, values / factor, values * factor)
    if presence and output_len:
        seen, counts = np.unique(
            np.asarray(tokens[prompt_len:], dtype=np.int64), return_counts=True
        )
        logits[seen] -= (params.presence_penalty + params.frequency_penalty * counts).astype(
            np.float32
        )
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += np.float32(bias)
    if masked:
        logits[list(params.stop_token_ids)] = -np.inf
    return logits


def _law(logits: Row, best: np.float32, params: SamplingParams) -> _Law:
    """Temperature and filters. The best token always stays, with weight 1."""
    weights = logits - best
    with np.errstate(over="ignore"):  # far below the best: -inf, and so a weight of 0
        weights *= np.float32(min(1.0 / params.temperature, _LARGEST))  # never 0 * inf
    np.exp(weights, out=weights)
    law = _Law(weights, None)
    if 0 < params.top_k < weights.size:
        law = _keep(law, weights >= np.partition(weights, -params.top_k)[-params.top_k])
    if params.top_p < 1.0:
        law = _top_p(law, params.top_p)
    if params.min_p > 0.0:
        law = _keep(law, law.weights >= np.float32(params.min_p))
    return law


def _top_p(law: _Law, top_p: float) -> _Law:
    """The likeliest tokens whose share first reaches `top_p`; of equals the lower id first."""
    total = float(law.weights.sum(dtype=np.float64))
    # n tokens below (1 - top_p) / n of the mass hold less than 1 - top_p together, so none of them
    # is needed; the margin of 2 covers rounding. This leaves little to sort.
    law = _keep(law, law.weights >= np.float32(0.5 * (1.0 - top_p) / law.weights.size * total))
    assert law.token_ids is not None
    order = _descending(law.weights)
    shares = np.cumsum(law.weights[order], dtype=np.float64)
    order = order[: int(np.searchsorted(shares, top_p * total)) + 1]
    return _Law(law.weights[order], law.token_ids[order])


def _descending(weights: Row) -> NDArray[np.uint64]:
    """Order of non-negative weights, largest first, of equals the earlier.

    Bits of non-negative floats order like the floats, so one vectorised sort of
    (inverted bits, index) pairs does it; a stable argsort is several times slower.
    """
    pairs = np.uint64(0xFFFFFFFF) - weights.view(np.uint32).astype(np.uint64)
    pairs <<= np.uint64(32)
    pairs |= np.arange(weights.size, dtype=np.uint64)
    pairs.sort()
    return pairs & np.uint64(0xFFFFFFFF)


def _keep(law: _Law, mask: NDArray[np.bool_]) -> _Law:
    places = np.flatnonzero(mask)
    token_ids = places.astype(np.uint32) if law.token_ids is None else law.token_ids[places]
    return _Law(law.weights[places], token_ids)


def _choose(law: _Law, key: int) -> int:
    """Gumbel-max over what the law keeps."""
    if law.token_ids is None:
        every = np.arange(law.weights.size, dtype=np.uint32)
        return int((law.weights / exponentials(key, every)).argmax())
    return int(law.token_ids[(law.weights / exponentials(key, law.token_ids)).argmax()])


def _greedy_logprob(
    logits: Row, processed: Row, token_id: int, params: SamplingParams
) -> TokenLogprob | None:
    if params.logprobs is None:
        return None
    return token_logprob(
        logits if params.logprobs_mode == "raw" else processed, token_id, params.logprobs
    )


def _sampled_logprob(
    logits: Row, law: _Law, token_id: int, params: SamplingParams
) -> TokenLogprob | None:
    if params.logprobs is None:
        return None
    if params.logprobs_mode == "raw":
        return token_logprob(logits, token_id, params.logprobs)
    with np.errstate(divide="ignore"):  # a weight may have underflowed to 0
        logprobs = np.log(law.weights / law.weights.sum(dtype=np.float64))
    ids = law.token_ids
    place = token_id if ids is None else int(np.flatnonzero(ids == token_id)[0])
    return TokenLogprob(token_id, float(logprobs[place]), _top(logprobs, ids, params.logprobs))


def _top(
    logprobs: NDArray[np.floating], token_ids: TokenIds | None, count: int
) -> tuple[TopLogprob, ...]:
    """The `count` best of finite logprob, best first, of equals the earlier."""
    count = min(count, logprobs.size)
    if count == 0:
        return ()
    places = np.flatnonzero(logprobs >= np.partition(logprobs, -count)[-count])
    places = places[np.argsort(-logprobs[places], kind="stable")][:count]
    return tuple(
        TopLogprob(int(p if token_ids is None else token_ids[p]), float(logprobs[p]))
        for p in places
        if np.isfinite(logprobs[p])
    )
