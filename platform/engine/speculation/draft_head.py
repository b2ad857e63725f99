"""Drafts from a small head on the target's own hidden states, with weights of its own per adapter."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from polyloom.adapters.source import AdapterSource
from polyloom.platform.engine.draft_heads.drafting import DraftState, run_ahead
from polyloom.platform.engine.draft_heads.heads import DraftHeads, SharedHead
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.speculation.drafter import NO_PROPOSAL, DraftRow, Proposal
from polyloom.routing.scheduler.sequence import Sequence


class DraftHeadDrafter:
    """Serves requests whose combination has a draft head. It keeps nothing between proposals."""

    name = "draft_head"
    needs_hidden = True
    looks_up = False

    def __init__(self, decoder: Decoder, heads: DraftHeads) -> None:
        self._decoder = decoder
        self._heads = heads

    def serves(self, sequence: Sequence) -> bool:
        return sequence.request.draft_head is not None

    def propose(self, rows: Seq[DraftRow]) -> list[Proposal]:
        proposals = [NO_PROPOSAL] * len(rows)
        for shared, places in self._by_head(rows):
            drafts = [_draft(rows[place], shared) for place in places]
            features = torch.stack([_hidden(rows[place]) for place in places])
            run_ahead(shared, self._decoder, drafts, features)
            for place, draft in zip(places, drafts, strict=True):
                proposals[place] = draft.proposal
        return proposals

    def close(self, sequence_id: str) -> None:
        self._heads.release(sequence_id)

    def _by_head(self, rows: Seq[DraftRow]) -> Iterable[tuple[SharedHead, list[int]]]:
        """Rows whose heads are on the device, by shared head, those of one delta together."""
        groups: dict[int, tuple[SharedHead, list[int]]] = {}
        for place, row in enumerate(rows):
            source = row.sequence.request.draft_head
            if source is None:
                continue
            shared = self._heads.ready(row.sequence.sequence_id, source)
            if shared is not None:
                groups.setdefault(id(shared), (shared, []))[1].append(place)
        for _, places in groups.values():
            places.sort(key=lambda place: _digest(_delta(rows[place])))
        return groups.values()


def _draft(row: DraftRow, shared: SharedHead) -> DraftState:
    sequence, delta = row.sequence, _delta(row)
    reach = shared.reach(delta)
    return DraftState(
        sampling=sequence.request.sampling,
        delta=delta,
        vocabulary=reach.vocabulary,
        length=min(row.length, reach.depth),
        last=sequence.tokens[-1],
        position=sequence.output_len,
        tokens=[],
        confidences=[],
    )


def _delta(row: DraftRow) -> AdapterSource | None:
    source = row.sequence.request.draft_head
    return None if source is None else source.delta


def _digest(delta: AdapterSource | None) -> str:
    return "" if delta is None else delta.digest


def _hidden(row: DraftRow) -> torch.Tensor:
    if row.hidden is None:
        raise ValueError(f"{row.sequence.sequence_id}: a draft head needs the hidden state")
    return row.hidden
