"""Runs a step plan on the device: packs tokens, calls the decoder, samples the rows that need it."""

from collections.abc import Mapping
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
from polyloom.platform.engine.graphs import DecodeGraphs, StepOutput
from polyloom.platform.engine.kernels.cuda_sampling import UNREAD, SampledRow
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.packing import attention_batch
from polyloom.platform.engine.reading import Reading, RowResult
from polyloom.platform.engine.structured.sequences import SequenceGrammars
from polyloom.routing.scheduler.batch import ScheduledSequence, StepPlan


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Of the N rows of a step that something is read from, in order.

    hidden [N, hidden], logits [N, V] fp32, both on the device; chosen: the token of each row that is
    sampled there.
    """

    hidden: torch.Tensor
    logits: torch.Tensor
    chosen: list[int]


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
        readings = [self._reading(item) for item in plan.scheduled]
        outputs = self._outputs(plan, readings)
        if outputs is None:
            return [RowResult()] * len(readings)
        on_host = _host_logits(readings, outputs.logits)
        results, first, first_on_host = [], 0, 0
        for reading in readings:
            if reading.on_device:
                result = reading.chosen(outputs.chosen[first : first + reading.count])
            else:
                end = first_on_host + reading.count
                result = reading.host(on_host[first_on_host:end])
                first_on_host = end
            if self._keeps_hidden and result.sampled:
                last = first + reading.count - 1 - len(reading.item.draft) + len(result.sampled) - 1
                result = replace(result, hidden=outputs.hidden[last])
            results.append(result)
            first += reading.count
        return results

    def _reading(self, item: ScheduledSequence) -> Reading:
        matcher, sampler = self._grammars.matcher(item.sequence.sequence_id), self._sampler
        on_device = sampler is not None and sampler.takes(item, constrained=matcher is not None)
        return Reading(item, matcher, on_device)

    def _outputs(self, plan: StepPlan, readings: Seq[Reading]) -> _Outputs | None:
        """Run the step; None where nothing is read from it."""
        items, counts = plan.scheduled, [reading.count for reading in readings]
        tokens = [token for item in items for token in item.token_ids]
        batch = self._attention_batch(plan)
        lora = self._lora_batch(items, [item.num_tokens for item in items])
        ends = np.cumsum([item.num_tokens for item in items])
        needed = [
            row for end, count in zip(ends, counts, strict=True) for row in range(end - count, end)
        ]
        asked = [row for reading in readings for row in self._asked(reading)]
        captured = self._captured(tokens, batch, lora, dict(zip(needed, asked, strict=True)))
        if captured is not None:
            return self._picked(captured, needed) if needed else None
        ids = torch.tensor(tokens, device=self._device)
        hidden = self._decoder.forward(ids, batch, lora, self._attention, self._lora_layers)
        if not needed:
            return None
        if len(needed) < len(hidden):
            hidden = hidden[torch.tensor(needed, device=self._device)]
        logits = self._decoder.logits(hidden, self._lora_batch(items, counts), self._lora_layers)
        if self._sampler is None or not any(reading.on_device for reading in readings):
            return _Outputs(hidden, logits, [])
        return _Outputs(hidden, logits, self._sampler.sample(logits, asked).tolist())

    def _asked(self, reading: Reading) -> list[SampledRow]:
        """What each of a sequence's rows is sampled by on the device."""
        if self._sampler is not None and reading.on_device:
            return self._sampler.rows(reading.item)
        return [UNREAD] * reading.count

    def _captured(
        self,
        tokens: Seq[int],
        batch: AttentionBatch,
        lora: LoraBatch,
        asked: Mapping[int, SampledRow],
    ) -> StepOutput | None:
        """The whole step by a graph, with all its rows; None if there is none for it."""
        if self._graphs is None:
            return None
        rows = [asked.get(row, UNREAD) for row in range(len(tokens))]
        return self._graphs.run(tokens, batch, lora, rows)

    def _picked(self, step: StepOutput, needed: Seq[int]) -> _Outputs:
        """The rows that are needed. The next step overwrites what the graph left."""
        hidden, logits, chosen = step.hidden, step.logits, step.chosen
        if len(needed) < len(hidden):
            rows = torch.tensor(needed, device=self._device)
            hidden, logits, chosen = hidden[rows], logits[rows], chosen[rows]
        elif self._keeps_hidden:
            hidden = hidden.clone()
        return _Outputs(hidden, logits, chosen.tolist())

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


def _host_logits(readings: Seq[Reading], logits: torch.Tensor) -> NDArray[np.float32]:
    """The rows of the sequences that are read on the host, one after the other."""
    on_host = [not reading.on_device for reading in readings for _ in range(reading.count)]
    if not any(on_host):  # nothing to be fetched, so the device is not waited for
        return np.empty((0, logits.shape[1]), dtype=np.float32)
    if not all(on_host):
        logits = logits[torch.tensor(on_host).nonzero().flatten().to(logits.device)]
    rows: NDArray[np.float32] = logits.cpu().numpy()
    return rows
