"""Limits of one batcher."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerConfig:
    """What a step and the queue may hold.

    token_budget: tokens of one step, decodes and prefill chunks together, at most.
    max_running: sequences that run at the same time; each may decode in every step, so it is at
        most the budget.
    queue_limit: sequences that wait.
    max_model_len: prompt and answer of one sequence, in tokens.
    adapter_patience: seconds that a sequence whose adapter finds no room lets younger ones with
        adapters overtake it; after that only base traffic passes, until pins have drained.
    block_patience: seconds that a sequence that finds no blocks lets others overtake it.
    itl_target: seconds between two tokens of a decoding sequence that chunks of prompts, beside it
        in a step, are to stay within; infinite: they take the whole budget.
    """

    token_budget: int
    max_running: int
    queue_limit: int
    max_model_len: int
    adapter_patience: float = 2.0
    block_patience: float = 2.0
    itl_target: float = math.inf

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "queue_limit", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.itl_target > 0:
            raise ValueError(f"itl_target must be more than 0 seconds, not {self.itl_target}")
        if self.max_running > self.token_budget:
            raise ValueError(
                f"max_running ({self.max_running}) exceeds token_budget ({self.token_budget}): "
                "the decodes of one step would not fit"
            )
