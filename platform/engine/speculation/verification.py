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


class Constraint(Protocol):
    """What a sequence's structure allows, token by token: `structured.matcher.GrammarMatcher`.

    It only ever follows tokens that come out, so a rejected draft leaves no trace in it.
    """

    @property
    def ended(self) -> bool:
        """The text is complete."""
        ...

    def allowed(self) -> NDArray[np.bool_]:
        """`[V]`, the tokens that may follow. Raises SamplingError."""
        ...

    def accept(self, token_id: int) -> None:
        """The sequence goes on with this token. Raises SamplingError."""
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
    constraint: Constraint | None = None,
) -> Verified:
    """Sample what follows `tokens`, taking over as much of `draft` as agrees.

    logits: `[1 + len(draft), V]` fp32, row i after `tokens` and the first i of the draft.  tokens:
    of which the first `prompt_len` are the prompt.  constraint: stands after `tokens`, and after what
    came out on return.  Nothing comes out after a stop token, after the end of the constraint's text
    or beyond `max_tokens`.
    """
    context = list(tokens)
    left = params.max_tokens - (len(tokens) - prompt_len)
    sampled: list[SampledToken] = []
    for row, drafted in zip(logits, (*draft, None), strict=True):
        try:
            sampled.append(_next(row, params, context, prompt_len, constraint))
        except SamplingError as error:
            return Verified(tuple(sampled), error)
        token_id = sampled[-1].token_id
        over = token_id in params.stop_token_ids or len(sampled) == left
        if token_id != drafted or over or (constraint is not None and constraint.ended):
            break
        context.append(token_id)
    return Verified(tuple(sampled))


def matched_tokens(draft: Sequence[int], tokens: Sequence[SampledToken]) -> int:
    """How many leading tokens of the draft came out: all of `tokens`, or all but the last."""
    last = len(tokens) - 1
    agrees = 0 <= last < len(draft) and tokens[last].token_id == draft[last]
    return last + 1 if agrees else max(last, 0)


def _next(
    row: NDArray[np.float32],
    params: SamplingParams,
    context: Sequence[int],
    prompt_len: int,
    constraint: Constraint | None,
) -> SampledToken:
    if constraint is None:
        return sample(row, params, context, prompt_len)
    token = sample(row, params, context, prompt_len, constraint.allowed())
    constraint.accept(token.token_id)
    return token
