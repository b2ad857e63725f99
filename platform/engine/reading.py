"""What is read from the rows of logits that a step brings for one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from polyloom.platform.engine.device_sampling import verified
from polyloom.platform.engine.errors import SamplingError
from polyloom.platform.engine.messages import TokenLogprob
from polyloom.platform.engine.sampler import SampledToken, token_logprob
from polyloom.platform.engine.speculation.verification import verify
from polyloom.platform.engine.structured.matcher import GrammarMatcher
from polyloom.routing.scheduler.batch import ScheduledSequence


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a step brought for one scheduled sequence.

    sampled: none while its prefill goes on; of a draft, the accepted tokens and the one after them.
    prompt_logprobs: of the prompt tokens that follow this step's rows.  error: why no token could
    be chosen after `sampled`.  hidden: `[hidden]`, the state that the last of `sampled` was read
    from, where somebody wants it.
    """

    sampled: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    error: SamplingError | None = None
    hidden: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One sequence of a step, and how its rows are read.

    on_device: its tokens are chosen where the logits are, which do not come to the host.
    """

    item: ScheduledSequence
    matcher: GrammarMatcher | None
    on_device: bool

    @property
    def count(self) -> int:
        """How many of its rows, counted from its end, something is read from."""
        prompt_rows = _prompt_rows(self.item)
        if prompt_rows:
            return self.item.start + self.item.num_tokens - prompt_rows.start
        return 1 + len(self.item.draft) if self.item.samples else 0

    def chosen(self, token_ids: Sequence[int]) -> RowResult:
        """From the `count` tokens that were chosen on the device."""
        taken = verified(self.item, token_ids)
        return RowResult(taken.tokens, error=taken.error)

    def host(self, logits: NDArray[np.float32]) -> RowResult:
        """From its rows `[count, V]`."""
        item, sequence = self.item, self.item.sequence
        sampling = sequence.request.sampling
        prompt_logprobs = _prompt_logprobs(item, logits)
        if not item.samples:
            return RowResult(prompt_logprobs=prompt_logprobs)
        taken = verify(
            logits[len(logits) - 1 - len(item.draft) :],
            sampling,
            sequence.tokens,
            sequence.prompt_len,
            item.draft,
            self.matcher,
        )
        return RowResult(taken.tokens, prompt_logprobs, taken.error)


def _prompt_rows(item: ScheduledSequence) -> range:
    """Positions in this chunk whose logits are the logprob of a prompt token not sent yet."""
    sequence = item.sequence
    if sequence.request.sampling.prompt_logprobs is None:
        return range(0)
    end = min(item.start + item.num_tokens, sequence.prompt_len - 1)
    return range(max(item.start, sequence.prompt_logprobs_sent - 1, 0), end)


def _prompt_logprobs(
    item: ScheduledSequence, logits: NDArray[np.float32]
) -> tuple[TokenLogprob, ...]:
    sequence, alternatives = item.sequence, item.sequence.request.sampling.prompt_logprobs
    if alternatives is None:
        return ()
    first = item.start + item.num_tokens - len(logits)
    read = [TokenLogprob(sequence.tokens[0], None)] if sequence.prompt_logprobs_sent == 0 else []
    for position in _prompt_rows(item):
        token = sequence.tokens[position + 1]
        read.append(token_logprob(logits[position - first], token, alternatives))
    return tuple(read)
