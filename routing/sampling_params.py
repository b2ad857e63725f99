"""How the next token is chosen: parameters in the engine's own terms."""

from typing import Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling of one sequence, a pure function of (logits, these, position).

    Order: repetition penalty, presence and frequency penalties, logit_bias, min_tokens mask,
    temperature, top-k, top-p, min-p, then the Gumbel-max choice keyed by (seed, choice, position).

    temperature: 0 is greedy.  top_k: 0 keeps all.  seed: 64 bit, always given (the API draws one
    when the client names none).  choice: index among a request's `n` sequences.
    stop_token_ids: end the sequence (the model's EOS ids among them unless ignored); the stop token
    is counted but is not part of the text.  logprobs: number of alternatives beside the chosen
    token, None for no logprobs at all.  prompt_logprobs: the same for prompt tokens.
    """

    max_tokens: int
    seed: int
    choice: int = 0
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    logprobs_mode: Literal["raw", "processed"] = "raw"
    prompt_logprobs: int | None = None
