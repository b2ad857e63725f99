"""How many drafts the target would have accepted, replayed over responses that it has given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polyloom.platform.engine.draft_heads.training.network import HeadNetwork
from polyloom.platform.engine.draft_heads.training.samples import Response, samples
from polyloom.platform.engine.speculation.drafter import DraftRow
from polyloom.platform.engine.speculation.ngram import NgramDrafter
from polyloom.routing.combination import Combination
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams
from polyloom.routing.scheduler.sequence import Sequence as GeneratedSequence

BOOTSTRAP_DRAWS = 2000
CONFIDENCE = 0.95

_PLACES_AT_ONCE = 1024


@dataclass(frozen=True)
class Replay:
    """Tokens and target steps of each response when decoded with drafts."""

    tokens: np.ndarray[tuple[int], np.dtype[np.float64]]
    steps: np.ndarray[tuple[int], np.dtype[np.float64]]

    @property
    def acceptance_length(self) -> float:
        """Tokens a target step, the bonus token included; 1 without any draft accepted."""
        return float(self.tokens.sum() / max(1.0, self.steps.sum()))


@torch.inference_mode()
def replay_head(
    network: HeadNetwork,
    responses: Sequence[Response],
    embeddings: Tensor,
    target_ids: Tensor,
    depth: int,
) -> Replay:
    """Greedy drafts of a head. embeddings: `[vocab, hidden]`, what the first layer reads."""
    places = samples(responses, depth)
    accepted: list[int] = []
    for chunk in torch.split(torch.arange(len(places)), _PLACES_AT_ONCE):
        features = places.hidden[places.features[chunk]]
        tokens = places.tokens[chunk]
        token = tokens[:, 0]
        alive = torch.ones(len(chunk), dtype=torch.bool)
        count = torch.zeros(len(chunk), dtype=torch.long)
        for k in range(depth):
            features, logits = network(features, embeddings[token].float())
            token = target_ids[logits.argmax(dim=-1)]
            alive &= token == tokens[:, k + 1]
            count += alive
        accepted += count.tolist()
    starts = iter(accepted)
    return _replay(
        responses,
        lambda r: [next(starts) for _ in range(len(r.output) - 1)],
    )


def replay_ngram(responses: Sequence[Response], depth: int) -> Replay:
    """Drafts copied from each response's own prompt and output."""
    return _replay(responses, lambda r: _ngram_accepted(r, depth))


def gain_lower_bound(head: Replay, others: Sequence[Replay], seed: int = 0) -> float:
    """Lower bound, at 95 %, of what `head` gains in acceptance length over the best of `others`.

    Responses are drawn anew with replacement; the best of the others is taken in each draw.
    """
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(head.tokens), (BOOTSTRAP_DRAWS, len(head.tokens)))

    def lengths(replay: Replay) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        drawn = replay.tokens[picks].sum(axis=1) / np.maximum(1, replay.steps[picks].sum(axis=1))
        return np.asarray(drawn)

    best = np.max([lengths(other) for other in others], axis=0)
    return float(np.quantile(lengths(head) - best, 1 - CONFIDENCE))


def _replay(responses: Sequence[Response], accepted_at: Callable[[Response], list[int]]) -> Replay:
    """Decode each response from its first token on: a step takes its accepted drafts and one more.

    accepted_at: drafts accepted after each token of the output but the last.
    """
    tokens, steps = [], []
    for response in responses:
        accepted = accepted_at(response)
        place = taken = 0
        while place < len(accepted):
            place += accepted[place] + 1
            taken += 1
        tokens.append(min(place, len(response.output) - 1))
        steps.append(taken)
    return Replay(np.array(tokens, dtype=np.float64), np.array(steps, dtype=np.float64))


def _ngram_accepted(response: Response, depth: int) -> list[int]:
    drafter = NgramDrafter()
    request = GenerationRequest(
        sequence_id="replay",
        tenant="",
        combination=Combination(base_digest="", template_digest=""),
        adapter=None,
        prompt=response.prompt,
        sampling=SamplingParams(max_tokens=len(response.output), seed=0),
    )
    sequence = GeneratedSequence(request, arrival=0.0)
    counts = []
    for index, token in enumerate(response.output[:-1]):
        sequence.tokens.append(token)
        draft = drafter.propose([DraftRow(sequence, depth)])[0].tokens
        follows = response.output[index + 1 :]
        agrees = [a == b for a, b in zip(draft, follows, strict=False)]
        counts.append(agrees.index(False) if False in agrees else len(agrees))
    return counts
