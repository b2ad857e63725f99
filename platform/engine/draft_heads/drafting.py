"""A draft: the head's features run ahead of the target, one token at a time, a batch at once."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from polyloom.adapters.source import AdapterSource
from polyloom.platform.engine.draft_heads.heads import SharedHead
from polyloom.platform.engine.model.decoder import Decoder
from polyloom.platform.engine.noise import draw_key, exponentials
from polyloom.platform.engine.speculation.drafter import Proposal
from polyloom.routing.sampling_params import SamplingParams


@dataclass(slots=True)
class DraftState:
    """One sequence's draft as it grows.

    vocabulary: target ids that it can draft.  last: the token that the next one follows.
    position: the next one's output position.
    """

    sampling: SamplingParams
    delta: AdapterSource | None
    vocabulary: NDArray[np.uint32]
    length: int
    last: int
    position: int
    tokens: list[int]
    confidences: list[float]

    @property
    def proposal(self) -> Proposal:
        return Proposal(tuple(self.tokens), tuple(self.confidences))


def run_ahead(
    shared: SharedHead, decoder: Decoder, drafts: Seq[DraftState], features: torch.Tensor
) -> None:
    """Fill every draft up to its length. features: `[N, hidden]`, the target's own at first.

    Drafts of one delta should be neighbours: its pages are read once for them.
    """
    growing = list(drafts)
    batch = shared.batch([draft.delta for draft in growing])
    while growing:
        last = torch.tensor([draft.last for draft in growing], device=features.device)
        features, logits = shared.packed.step(features, decoder.embed(last), batch, shared.layers)
        _extend(growing, logits)
        kept = [i for i, draft in enumerate(growing) if len(draft.tokens) < draft.length]
        if len(kept) < len(growing):
            growing = [growing[i] for i in kept]
            if growing:
                features = features[torch.tensor(kept, device=features.device)]
                batch = shared.batch([draft.delta for draft in growing])


def _extend(drafts: Seq[DraftState], logits: torch.Tensor) -> None:
    """Choose each draft's next token with the noise that the target will choose by."""
    width = logits.shape[1]
    if any(len(draft.vocabulary) < width for draft in drafts):
        ends = torch.tensor([[len(draft.vocabulary)] for draft in drafts], device=logits.device)
        logits = logits.masked_fill(torch.arange(width, device=logits.device) >= ends, -torch.inf)
    peaks, best = logits.max(dim=1)
    certainties = (peaks - logits.logsumexp(dim=1)).exp().tolist()
    for row, (draft, place) in enumerate(zip(drafts, best.tolist(), strict=True)):
        confidence = certainties[row]
        if draft.sampling.temperature > 0.0:
            place, confidence = _sampled(logits[row].cpu().numpy(), draft)
        draft.last = int(draft.vocabulary[place])
        draft.tokens.append(draft.last)
        draft.confidences.append(confidence)
        draft.position += 1


def _sampled(logits: NDArray[np.float32], draft: DraftState) -> tuple[int, float]:
    """The place in the draft's vocabulary that its noise picks, and its probability."""
    sampling = draft.sampling
    logits = logits[: len(draft.vocabulary)]
    weights = np.exp((logits - logits.max()) / np.float32(sampling.temperature))
    key = draw_key(sampling.seed, sampling.choice, draft.position)
    place = int((weights / exponentials(key, draft.vocabulary)).argmax())
    return place, float(weights[place] / weights.sum())
