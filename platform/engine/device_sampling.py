"""A step's tokens chosen where its logits are: only token ids come to the host.

Sequences that ask for logprobs, or that a grammar constrains, are read on the host as before.
"""

from collections.abc import Sequence

import torch

from polyloom.kvcache.kernels.cuda import cuda_kernels
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.errors import SamplingError
from polyloom.platform.engine.kernels.cuda_sampling import (
    KERNELS,
    MASKED,
    SEEN,
    SOURCE,
    RowEdit,
    SampledRow,
    sample_rows,
)
from polyloom.platform.engine.noise import draw_key
from polyloom.platform.engine.sampler import SampledToken
from polyloom.platform.engine.speculation.verification import Verified
from polyloom.routing.sampling_params import SamplingParams
from polyloom.routing.scheduler.batch import ScheduledSequence

OP_NAME = "sampling"


class DeviceSampler:
    """Ledger `sampling`: rows sampled on the device; fallbacks are sequences read on the host."""

    def __init__(self, capabilities: Capabilities, device: torch.device) -> None:
        why = "one launch a step; only token ids come to the host"
        seconds = cuda_kernels(SOURCE, KERNELS, device.type).compile(device)
        self._ledger = capabilities.register(OP_NAME, "cuda", why, KERNELS, seconds)

    def takes(self, item: ScheduledSequence, *, constrained: bool) -> bool:
        """Its tokens can be chosen without its logits; counted where they cannot."""
        sampling = item.sequence.request.sampling
        if not item.samples:
            return False
        if constrained:
            self._ledger.fell_back("a grammar constrains it")
        elif sampling.logprobs is not None or sampling.prompt_logprobs is not None:
            self._ledger.fell_back("logprobs are asked for")
        else:
            self._ledger.engaged += 1 + len(item.draft)
            return True
        return False

    def rows(self, item: ScheduledSequence) -> list[SampledRow]:
        """What asks for the target's own token after each prefix of the item's draft."""
        sequence = item.sequence
        params, tokens = sequence.request.sampling, list(sequence.tokens)
        return [
            sampled_row(params, [*tokens, *item.draft[:drafted]], sequence.prompt_len)
            for drafted in range(1 + len(item.draft))
        ]

    def sample(self, logits: torch.Tensor, rows: Sequence[SampledRow]) -> torch.Tensor:
        """The token of each row, `[N]` int32 where the logits `[N, V]` are; those may change."""
        return sample_rows(logits.contiguous(), rows)


def sampled_row(params: SamplingParams, tokens: Sequence[int], prompt_len: int) -> SampledRow:
    """The row that follows `tokens`, of which the first `prompt_len` are the prompt."""
    return SampledRow(
        key=draw_key(params.seed, params.choice, len(tokens) - prompt_len),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        edits=_edits(params, tokens, prompt_len),
    )


def verified(item: ScheduledSequence, chosen: Sequence[int]) -> Verified:
    """`verification.verify` over tokens that are chosen already: one after each prefix of the
    draft."""
    sequence = item.sequence
    params = sequence.request.sampling
    left = params.max_tokens - (len(sequence.tokens) - sequence.prompt_len)
    sampled: list[SampledToken] = []
    for token_id, drafted in zip(chosen, (*item.draft, None), strict=True):
        if token_id < 0:
            return Verified(tuple(sampled), SamplingError("the logits leave no token"))
        sampled.append(SampledToken(token_id, None))
        over = token_id in params.stop_token_ids or len(sampled) == left
        if token_id != drafted or over:
            break
    return Verified(tuple(sampled))


def _edits(params: SamplingParams, tokens: Sequence[int], prompt_len: int) -> tuple[RowEdit, ...]:
    """Each token that the parameters change."""
    output = tokens[prompt_len:]
    seen: set[int] = set(tokens) if params.repetition_penalty != 1.0 else set()
    counts: dict[int, int] = {}
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        for token in output:
            counts[token] = counts.get(token, 0) + 1
    masked = set(params.stop_token_ids) if len(output) < params.min_tokens else set()
    tokens_changed = sorted(seen | counts.keys() | params.logit_bias.keys() | masked)
    return tuple(
        RowEdit(
            token,
            counts.get(token, 0),
            SEEN * (token in seen) | MASKED * (token in masked),
            params.logit_bias.get(token, 0.0),
        )
        for token in tokens_changed
    )
