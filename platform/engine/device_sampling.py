"""A step's tokens chosen where its logits are: only token ids come to the host.

Sequences that ask for logprobs, or that a grammar constrains, are read on the host as before.
"""

from collections.abc import Sequence

import torch

from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.errors import SamplingError
from polyloom.platform.engine.kernels.cuda_sampling import SampledRow, kernel_names, sample_rows
from polyloom.platform.engine.sampler import SampledToken
from polyloom.platform.engine.speculation.verification import Verified
from polyloom.routing.scheduler.batch import ScheduledSequence

OP_NAME = "sampling"


class DeviceSampler:
    """Ledger `sampling`: rows sampled on the device; fallbacks are rows read on the host."""

    def __init__(self, capabilities: Capabilities) -> None:
        kernels = kernel_names(torch.float32)
        self._ledger = capabilities.register(OP_NAME, "cuda", kernels=kernels)

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
            return True
        return False

    def sample(self, logits: torch.Tensor, items: Sequence[ScheduledSequence]) -> list[Verified]:
        """What comes out of each of `items`; logits: their `1 + len(draft)` rows each, [N, V]."""
        rows = [row for item in items for row in _rows(item)]
        self._ledger.engaged += len(rows)
        chosen = sample_rows(logits.float().contiguous(), rows).tolist()
        results, first = [], 0
        for item in items:
            count = 1 + len(item.draft)
            results.append(_verified(item, chosen[first : first + count]))
            first += count
        return results


def _rows(item: ScheduledSequence) -> list[SampledRow]:
    """The target's own token after each prefix of the draft."""
    sequence = item.sequence
    params, tokens = sequence.request.sampling, list(sequence.tokens)
    return [
        SampledRow(params, [*tokens, *item.draft[:drafted]], sequence.prompt_len)
        for drafted in range(1 + len(item.draft))
    ]


def _verified(item: ScheduledSequence, chosen: Sequence[int]) -> Verified:
    """`verification.verify` over tokens that are chosen already."""
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
