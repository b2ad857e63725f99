"""Runs a step plan on the device: packs tokens, calls the decoder, samples the rows that need it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from polyloom.adapters.layers import LoraLayers
from polyloom.adapters.residency import Residency
from polyloom.adapters.segments import LoraBatch
from polyloom.kvcache.attention import PagedAttention
from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.manager import KVCacheManager
from polyloom.platform.engine.device_sampling import DeviceSampler
from polyloom.platform.engine.errors import SamplingError
from polyloom.platform.engine.graphs import DecodeGraphs
from polyloom.platform.engine.messages import TokenLogprob
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.packing import attention_batch
from polyloom.platform.engine.sampler import SampledToken, token_logprob
from polyloom.platform.engine.speculation.verification import verify
from polyloom.platform.engine.structured.matcher import GrammarMatcher
from polyloom.platform.engine.structured.sequences import SequenceGrammars
from polyloom.routing.scheduler.batch import ScheduledSequence, StepPlan


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


class ModelRunner:
    """The base with its cache and adapters. One call at a time, from the step loop's thread."""

    def __init__(
        self,
        decoder: Decoder,
        attention: PagedAttention,
        lora_layers: LoraLayers,
        residency: Residency,
        blocks: KVCacheManager,
        grammars: SequenceGrammars,
        block_size: int,
        device: torch.device,
        *,
        keeps_hidden: bool,
        graphs: DecodeGraphs | None = None,
        sampler: DeviceSampler | None = None,
    ) -> None:
        """keeps_hidden: results have `hidden`.  graphs: steps that fit one go through it.  sampler:
        chooses tokens where the logits are, if it can; None: all logits come to the host."""
        self._decoder = decoder
        self._attention = attention
        self._lora_layers = lora_layers
        self._residency = residency
        self._blocks = blocks
        self._grammars = grammars
        self._block_size = block_size
        self._device = device
        self._keeps_hidden = keeps_hidden
        self._graphs = graphs
        self._sampler = sampler

    def run(self, plan: StepPlan) -> list[RowResult]:
        """One forward over the plan's tokens; a result for each scheduled sequence, in order."""
        batch = self._attention_batch(plan)
        tokens = [token for item in plan.scheduled for token in item.token_ids]
        lora = self._lora_batch(plan.scheduled, [item.num_tokens for item in plan.scheduled])
        hidden = None if self._graphs is None else self._graphs.forward(tokens, batch, lora)
        if hidden is None:
            ids = torch.tensor(tokens, device=self._device)
            hidden = self._decoder.forward(ids, batch, lora, self._attention, self._lora_layers)
        return self._results(plan, hidden)

    def _results(self, plan: StepPlan, hidden: torch.Tensor) -> list[RowResult]:
        """Logits of the rows that something is read from, and what is read from them."""
        counts = [_rows_needed(item) for item in plan.scheduled]
        if not any(counts):
            return [RowResult()] * len(plan.scheduled)
        ends = np.cumsum([item.num_tokens for item in plan.scheduled])
        rows = [
            row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)
        ]
        if len(rows) < len(hidden):
            hidden = hidden[torch.tensor(rows, device=self._device)]
        logits = self._decoder.logits(
            hidden, self._lora_batch(plan.scheduled, counts), self._lora_layers
        )
        results, first = [], 0
        read = self._read_all(plan.scheduled, counts, logits)
        for item, count, result in zip(plan.scheduled, counts, read, strict=True):
            if self._keeps_hidden and result.sampled:
                last = first + count - 1 - len(item.draft) + len(result.sampled) - 1
                result = replace(result, hidden=hidden[last])
            results.append(result)
            first += count
        return results

    def _read_all(
        self, items: Seq[ScheduledSequence], counts: Seq[int], logits: torch.Tensor
    ) -> list[RowResult]:
        """What is read from each sequence's `counts` rows: on the device where that will do."""
        matchers = [self._grammars.matcher(item.sequence.sequence_id) for item in items]
        parts = torch.split_with_sizes(logits, list(counts))
        sampler = self._sampler
        on_device = [
            index
            for index, item in enumerate(items)
            if sampler and sampler.takes(item, constrained=matchers[index] is not None)
        ]
        sampled: dict[int, RowResult] = {}
        if sampler and on_device:
            chosen = sampler.sample(
                torch.cat([parts[index] for index in on_device]), [items[i] for i in on_device]
            )
            for index, verified in zip(on_device, chosen, strict=True):
                sampled[index] = RowResult(verified.tokens, error=verified.error)
        if len(on_device) < len(items):
            rest = [index for index in range(len(items)) if index not in sampled]
            host = torch.cat([parts[index] for index in rest]).float().cpu().numpy()
            ends = np.cumsum([counts[index] for index in rest])
            for index, end in zip(rest, ends, strict=True):
                rows = host[end - counts[index] : end]
                sampled[index] = _read(items[index], rows, matchers[index])
        return [sampled[index] for index in range(len(items))]

    def _attention_batch(self, plan: StepPlan) -> AttentionBatch:
        items = plan.scheduled
        return attention_batch(
            [self._blocks.blocks(item.sequence.sequence_id) for item in items],
            [item.start for item in items],
            [item.num_tokens for item in items],
            self._block_size,
        )

    def _lora_batch(self, items: Seq[ScheduledSequence], counts: Seq[int]) -> LoraBatch:
        """Segments of `counts` rows of each sequence; those without rows are left out."""
        return self._residency.batch(
            [
                (item.sequence.adapter_digest, count)
                for item, count in zip(items, counts, strict=True)
                if count
            ]
        )


def _prompt_rows(item: ScheduledSequence) -> range:
    """Positions in this chunk whose logits are the logprob of a prompt token not sent yet."""
    sequence = item.sequence
    if sequence.request.sampling.prompt_logprobs is None:
        return range(0)
    end = min(item.start + item.num_tokens, sequence.prompt_len - 1)
    return range(max(item.start, sequence.prompt_logprobs_sent - 1, 0), end)


def _rows_needed(item: ScheduledSequence) -> int:
    """How many of the chunk's rows, counted from its end, something is read from."""
    prompt_rows = _prompt_rows(item)
    if prompt_rows:
        return item.start + item.num_tokens - prompt_rows.start
    return 1 + len(item.draft) if item.samples else 0


def _read(
    item: ScheduledSequence, logits: NDArray[np.float32], matcher: GrammarMatcher | None
) -> RowResult:
    """Read one sequence's rows: `logits` `[n, V]` of the last n of its chunk."""
    sequence, sampling = item.sequence, item.sequence.request.sampling
    first = item.start + item.num_tokens - len(logits)
    prompt_logprobs = []
    if sampling.prompt_logprobs is not None and sequence.prompt_logprobs_sent == 0:
        prompt_logprobs.append(TokenLogprob(sequence.tokens[0], None))
    for position in _prompt_rows(item):
        token = sequence.tokens[position + 1]
        alternatives = sampling.prompt_logprobs or 0
        prompt_logprobs.append(token_logprob(logits[position - first], token, alternatives))
    if not item.samples:
        return RowResult(prompt_logprobs=tuple(prompt_logprobs))
    verified = verify(
        logits[len(logits) - 1 - len(item.draft) :],
        sampling,
        sequence.tokens,
        sequence.prompt_len,
        item.draft,
        matcher,
    )
    return RowResult(verified.tokens, tuple(prompt_logprobs), verified.error)
