"""The oracle of the parity suite: `transformers` and `peft`, in fp32, one adapter at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Answer:
    """What the engine returned for one greedy request: its tokens and their raw logprobs."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """One answer against the oracle.

    difference: largest |logprob − oracle's logprob| over the returned tokens.
    wrong: positions whose token is not the oracle's best, and no near tie either.
    near_ties: positions where another token is best by less than 1e-4.
    """

    difference: float
    wrong: int
    near_ties: int


class Oracle:
    """One base and, loaded by turns, PEFT's own adapters on it."""

    def __init__(self, base: Path) -> None:
        self._base = base

    def compare(self, adapter: Path | None, answers: Sequence[Answer]) -> list[Comparison]:
        """Teacher-force every answer through the base with `adapter` alone (None: the bare base).

        Equal greedy tokens at every position are the same as an equal free-running greedy text.
        """
        model = self._model(adapter)
        with torch.inference_mode():
            return [self._compare_one(model, answer) for answer in answers]

    def next_logits(self, adapter: Path | None, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits `[vocab]` of what follows `tokens`."""
        with torch.inference_mode():
            logits = self._model(adapter)(input_ids=torch.tensor([list(tokens)])).logits
        row: NDArray[np.float32] = logits[0, -1].float().numpy()
        return row

    def _model(self, adapter: Path | None) -> torch.nn.Module:
        model = AutoModelForCausalLM.from_pretrained(self._base, dtype=torch.float32)
        if adapter is not None:
            model = PeftModel.from_pretrained(model, adapter)
        return model.eval()

    @staticmethod
    def _compare_one(model: torch.nn.Module, answer: Answer) -> Comparison:
        ids = torch.tensor([answer.prompt + answer.tokens])
        logits = model(input_ids=ids).logits[0, len(answer.prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1)
        tokens = torch.tensor(answer.tokens)
        chosen = logprobs.gather(1, tokens[:, None])[:, 0]
        gap = logits.max(-1).values - logits.gather(1, tokens[:, None])[:, 0]
        return Comparison(
            difference=float((chosen - torch.tensor(answer.logprobs)).abs().max()),
            wrong=int((gap >= NEAR_TIE).sum()),
            near_ties=int(((gap > 0) & (gap < NEAR_TIE)).sum()),
        )
