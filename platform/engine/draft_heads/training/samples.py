"""What a head learns from: the target's own responses with the states they were sampled from."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Response:
    """One greedy answer.

    prompt, output: token ids; the output ends with the stop token if it stopped.
    hidden: `[len(output), hidden]`, the final-normed states that the output was sampled from.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    hidden: Tensor


@dataclass(frozen=True)
class Samples:
    """Every place of some responses from which `depth` drafts can be begun.

    hidden: `[R, hidden]` fp32, all responses' states.
    features: `[N]` row of `hidden` that each place starts from.
    tokens: `[N, depth + 1]` the place's own token, then those that follow it; -1 beyond the end.
    states: `[N, depth]` row of `hidden` that each following token was sampled from; 0 beyond the end.
    """

    hidden: Tensor
    features: Tensor
    tokens: Tensor
    states: Tensor

    def __len__(self) -> int:
        return len(self.features)


def samples(responses: Sequence[Response], depth: int) -> Samples:
    """Lay out the places of `responses`, in order; the last token of each starts nothing."""
    features: list[int] = []
    tokens: list[list[int]] = []
    states: list[list[int]] = []
    first = 0
    for response in responses:
        output = response.output
        for start in range(len(output) - 1):
            after = range(start + 1, start + 1 + depth)
            features.append(first + start)
            tokens.append([output[start], *(output[i] if i < len(output) else -1 for i in after)])
            states.append([first + i if i < len(output) else 0 for i in after])
        first += len(output)
    return Samples(
        hidden=torch.cat([response.hidden.float() for response in responses]),
        features=torch.tensor(features),
        tokens=torch.tensor(tokens).view(-1, depth + 1),
        states=torch.tensor(states).view(-1, depth),
    )


def draft_vocabulary(responses: Sequence[Response], size: int, vocab_size: int) -> Tensor:
    """The `size` tokens that responses use most, in rising order.

    Where they use fewer, prompts' tokens come next, then low ids: merges are learned in order of
    frequency.
    """
    outputs = Counter(token for r in responses for token in r.output)
    inputs = Counter(token for r in responses for token in r.prompt)
    ranked = [token for counts in (outputs, inputs) for token, _ in counts.most_common()]
    chosen = list(dict.fromkeys([*ranked, *range(vocab_size)]))[: min(size, vocab_size)]
    return torch.tensor(sorted(chosen))
