"""Which tokens of a draft come out: those that the target would have sampled itself.

The target's token after each prefix of the draft is sampled with the noise of its own position, so
it is the token that decoding one at a time would give. The longest prefix of the draft that agrees
is accepted, and the target's token follows it. Nothing is drawn for a draft, so no draft can change
a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from polyloom.platform.engine.errors import SamplingError
from polyloom.platform.engine.sampler import SampledToken, sample
from polyloom.routing.sampling_params import SamplingParams


class DraftMasks(Protocol):
    """Which tokens a sequence's structure allows after each prefix of its draft."""

    def after(self, accepted: int) -> NDArray[np.bool_]:
        """`[V]` of the tokens allowed after the first `accepted` tokens of the draft."""
        ...


@dataclass(frozen=True, slots=True)
class Verified:
    """What came out of one sequence's rows.

    tokens: accepted ones, and the target's own after them unless sampling it failed.
    error: why the token after `tokens` could not be chosen.
    """

    tokens: tuple[SampledToken, ...]
    error: SamplingError | None = None


def verify(
    logits: NDArray[np.float32],
    params: SamplingParams,
    tokens: Sequence[int],
    prompt_len: int,
    draft: Sequence[int],
    masks: DraftMasks | None = None,
) -> Verified:
    """Sample what follows `tokens`, taking over as much of `draft` as agrees.

    logits: `[1 + len(draft), V]` fp32, row i after `tokens` and the first i of the draft.  tokens:
    of which the first `prompt_len` are the prompt.  Nothing comes out after a stop token or beyond
    `max_tokens`.
    """
    context = list(tokens)
    left = params.max_tokens - (len(tokens) - prompt_len)
    sampled: list[SampledToken] = []
    for row, drafted in zip(logits, (*draft, None), strict=True):
        allowed = None if masks is None else masks.after(len(sampled))
        try:
            sampled.append(sample(row, params, context, prompt_len, allowed))
        except SamplingError as error:
            return Verified(tuple(sampled), error)
        token_id = sampled[-1].token_id
        if token_id != drafted or token_id in params.stop_token_ids or len(sampled) == left:
            break
        context.append(token_id)
    return Verified(tuple(sampled))
