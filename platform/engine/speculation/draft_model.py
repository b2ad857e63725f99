"""Drafts from another, smaller causal LM of the same tokenizer, with a paged cache of its own."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from polyloom.adapters.base_layout import ModuleGroup
from polyloom.adapters.segments import LoraBatch, lora_batch
from polyloom.kvcache.attention import PagedAttention
from polyloom.kvcache.errors import OutOfBlocksError
from polyloom.kvcache.manager import KVCacheManager
from polyloom.platform.engine.errors import SamplingError
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.packing import attention_batch
from polyloom.platform.engine.sampler import sample
from polyloom.platform.engine.speculation.drafter import NO_PROPOSAL, DraftRow, Proposal
from polyloom.routing.scheduler.sequence import Sequence

CATCH_UP = 256  # tokens that a sequence is behind by, at most, for a draft to be worth the wait


class _NoAdapters:
    """A draft model serves every revision alike."""

    def apply(
        self,
        group: ModuleGroup,
        layer: int,
        x: torch.Tensor,
        y: torch.Tensor,
        batch: LoraBatch,
        bias: torch.Tensor | None = None,
    ) -> None:
        """Not called: its batches have no adapter."""


class DraftModel:
    """A decoder, its attention and its blocks."""

    def __init__(
        self,
        decoder: Decoder,
        attention: PagedAttention,
        blocks: KVCacheManager,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self.max_model_len = decoder.config.max_model_len
        self._decoder = decoder
        self._attention = attention
        self._block_size = block_size
        self._device = device

    def run(self, runs: Seq["Run"]) -> NDArray[np.float32]:
        """Append the runs' tokens to their caches; logits `[len(runs), V]` after each one's last."""
        counts = [len(run.tokens) for run in runs]
        batch = attention_batch(
            [self.blocks.blocks(run.sequence_id) for run in runs],
            [run.start for run in runs],
            counts,
            self._block_size,
        )
        tokens = torch.tensor([t for run in runs for t in run.tokens], device=self._device)
        bare, hook = lora_batch([(None, sum(counts))]), _NoAdapters()
        hidden = self._decoder.forward(tokens, batch, bare, self._attention, hook)
        last = torch.tensor(np.cumsum(counts) - 1, device=self._device)
        logits = self._decoder.logits(hidden[last], lora_batch([(None, len(runs))]), hook)
        return np.asarray(logits.float().cpu().numpy())


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens of one sequence, from position `start`."""

    sequence_id: str
    start: int
    tokens: Seq[int]


@dataclass(slots=True)
class _Cached:
    """What a sequence's cache holds: of its first `verified` tokens, then of what was drafted."""

    verified: int = 0
    drafted: tuple[int, ...] = ()


@dataclass(slots=True)
class _Growing:
    """A draft on its way."""

    row: DraftRow
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def proposal(self) -> Proposal:
        return Proposal(tuple(self.tokens), tuple(self.confidences))

    def take(self, logits: NDArray[np.float32]) -> None:
        """Sample the next token as the target does, with the noise of its position."""
        sequence = self.row.sequence
        params = msgspec.structs.replace(sequence.request.sampling, logprobs=None)
        context = [*sequence.tokens, *self.tokens]
        try:
            token = sample(logits, params, context, sequence.prompt_len).token_id
        except SamplingError:
            self.ended = True
            return
        self.tokens.append(token)
        self.confidences.append(_probability(logits, token))
        full = len(self.tokens) == self.row.length
        self.ended = full or token in params.stop_token_ids


class DraftModelDrafter:
    """Runs ahead of the target by its own model, token by token, all rows together."""

    name = "draft_model"
    needs_hidden = False
    looks_up = False

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._cached: dict[str, _Cached] = {}

    def serves(self, sequence: Sequence) -> bool:
        request = sequence.request
        longest = len(request.prompt) + request.sampling.max_tokens
        return longest <= self._model.max_model_len

    def propose(self, rows: Seq[DraftRow]) -> list[Proposal]:
        drafts = {row.sequence.sequence_id: _Growing(row) for row in rows if self._ready(row)}
        runs = [self._catch_up(draft.row) for draft in drafts.values()]
        while runs:
            for run, logits in zip(runs, self._model.run(runs), strict=True):
                drafts[run.sequence_id].take(logits)
            runs = [self._next(draft) for draft in drafts.values() if not draft.ended]
        for sequence_id, draft in drafts.items():
            self._cached[sequence_id].drafted = tuple(draft.tokens[:-1])  # the last has not run
        return [
            drafts[row.sequence.sequence_id].proposal
            if row.sequence.sequence_id in drafts
            else NO_PROPOSAL
            for row in rows
        ]

    def close(self, sequence_id: str) -> None:
        if self._cached.pop(sequence_id, None) is not None and sequence_id in self._model.blocks:
            self._model.blocks.free(sequence_id)

    def _ready(self, row: DraftRow) -> bool:
        """Room for a draft, and a cache that is not far behind; else it is brought nearer."""
        sequence = row.sequence
        sequence_id, tokens, blocks = sequence.sequence_id, sequence.tokens, self._model.blocks
        cached = self._cached.setdefault(sequence_id, _Cached())
        self._keep_agreeing(sequence, cached)
        try:
            blocks.reserve(sequence_id, len(tokens) + row.length)
        except OutOfBlocksError:
            self.close(sequence_id)
            return False
        if len(tokens) - cached.verified <= CATCH_UP:
            return True
        part = tokens[cached.verified : cached.verified + CATCH_UP]
        self._model.run([Run(sequence_id, cached.verified, part)])
        cached.verified += CATCH_UP
        return False

    def _keep_agreeing(self, sequence: Sequence, cached: _Cached) -> None:
        """Take over what of the last draft came out; the rest is run over."""
        came = sequence.tokens[cached.verified : -1]
        for token, drafted in zip(came, cached.drafted, strict=False):
            if token != drafted:
                break
            cached.verified += 1
        cached.verified = min(cached.verified, len(sequence.tokens) - 1)  # the last is to run
        cached.drafted = ()

    def _catch_up(self, row: DraftRow) -> Run:
        """What of the sequence has not run here, its last token at least."""
        sequence = row.sequence
        cached = self._cached[sequence.sequence_id]
        run = Run(sequence.sequence_id, cached.verified, sequence.tokens[cached.verified :])
        cached.verified = len(sequence.tokens)
        return run

    def _next(self, draft: _Growing) -> Run:
        sequence = draft.row.sequence
        start = len(sequence.tokens) + len(draft.tokens) - 1
        return Run(sequence.sequence_id, start, draft.tokens[-1:])


def _probability(logits: NDArray[np.float32], token: int) -> float:
    return float(1.0 / np.exp(logits - logits[token]).sum(dtype=np.float64))
