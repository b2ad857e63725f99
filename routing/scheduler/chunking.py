"""How many prompt tokens a step takes: as many as the running decodes' pace allows.

A step's seconds are fitted as a linear function of what it runs, from the steps just measured; the
largest chunk whose predicted step stays within the target is taken.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from polyloom.routing.scheduler.batch import ScheduledSequence, StepPlan

FLOOR = 64
"""Prompt tokens that a step takes in any case: fewer pay a step's fixed cost too often, and prompts
would not get on at all where the decodes alone take longer than the target."""

GRAIN = 32
"""Sizes are multiples of this."""

FIRST = 128
"""Prompt tokens beside decodes before anything was measured."""

ENOUGH = 8
"""Steps with prompt tokens after which their cost is taken as known."""

_DECAY = 0.97  # what a measured step keeps of its weight with each later one of its kind
_UNITS = np.array([1.0, 16.0, 128.0, 16384.0])  # keeps the features of usual steps near 1
_RIDGE = 1e-4

Array = NDArray[np.float64]


def _features(decodes: float, prompt_tokens: float, attended: float) -> Array:
    features: Array = np.array([1.0, decodes, prompt_tokens, attended]) / _UNITS
    return features


class StepCosts:
    """Seconds of a step ≈ fixed + a·decodes + b·prompt tokens + c·attended, all at least 0.

    decodes: tokens of sequences that decode, drafted ones included.  attended: over the step's
    tokens, the tokens each one looks back at. Least squares of the relative error, so one step that
    the machine held up weighs little. Steps with and without prompt tokens fade each on their own:
    a minute of decodes alone does not make it forget what a prompt costs.
    """

    def __init__(self) -> None:
        self._products = np.zeros((2, 4, 4))
        self._sums = np.zeros((2, 4))
        self._weights = np.zeros(4)
        self._chunks_seen = 0
        self._predictions = 0
        self._error = 0.0

    @property
    def known(self) -> bool:
        """Enough steps with prompt tokens have been seen to say what these cost."""
        return self._chunks_seen >= ENOUGH

    @property
    def fixed(self) -> float:
        """Seconds that a step costs whatever it runs."""
        return float(self._weights[0])

    @property
    def error(self) -> float:
        """Mean relative error of late predictions."""
        return self._error

    def predict(self, decodes: int, prompt_tokens: int, attended: float) -> float:
        """Seconds of such a step."""
        return float(_features(decodes, prompt_tokens, attended) @ self._weights)

    def measured(self, decodes: int, prompt_tokens: int, attended: float, seconds: float) -> None:
        """Such a step took `seconds`, more than 0."""
        if self.known:
            relative = abs(self.predict(decodes, prompt_tokens, attended) / seconds - 1)
            self._predictions += 1
            pace = max(1 - _DECAY, 1 / self._predictions)
            self._error += (min(relative, 1.0) - self._error) * pace
        row = _features(decodes, prompt_tokens, attended) / seconds
        kind = 1 if prompt_tokens else 0
        self._chunks_seen += kind
        self._products[kind] = _DECAY * self._products[kind] + np.outer(row, row)
        self._sums[kind] = _DECAY * self._sums[kind] + row
        self._weights = _non_negative(self._products.sum(0), self._sums.sum(0))


def _non_negative(products: Array, sums: Array) -> Array:
    """Least squares by its normal equations; what would be negative is left out, and so 0."""
    kept = list(range(len(sums)))
    weights = np.zeros(len(sums))
    while kept:
        system = products[np.ix_(kept, kept)]
        ridge = _RIDGE * np.diag(np.diag(system) + 1e-12)
        solved = np.linalg.solve(system + ridge, sums[kept])
        if solved.min() >= 0:
            weights[kept] = solved
            break
        kept.pop(int(solved.argmin()))
    return weights


class ChunkSizer:
    """Chooses each step's prompt tokens, and counts what that made of the prompts.

    size: prompt tokens of the last step that cut a prompt.  chunks_total: pieces that prompts were
    run in.  changes_total: how often `size` became another.  overhead_seconds: for each piece but a
    prompt's last, the fixed cost of the step that the rest waits for; what cutting costs at most.
    """

    def __init__(self, token_budget: int, itl_target: float) -> None:
        """itl_target: seconds from one token of a decoding sequence to its next; infinite: chunks
        are as large as the budget."""
        self.costs = StepCosts()
        self.size = FIRST
        self.chunks_total = 0
        self.changes_total = 0
        self.overhead_seconds = 0.0
        self._token_budget = token_budget
        self._target = itl_target

    def prefill_tokens(self, decodes: Iterable[ScheduledSequence], start: int) -> int:
        """Prompt tokens for a step that runs `decodes`; `start`: where the first prompt stands."""
        items = tuple(decodes)
        room = self._token_budget - len(items)
        if not items or math.isinf(self._target):
            return room
        return min(room, self._beside(items, start))

    def ran(self, plan: StepPlan, seconds: float) -> None:
        """A step took `seconds`."""
        chunks = [item for item in plan.scheduled if not item.decodes]
        prompt_tokens = sum(item.num_tokens for item in chunks)
        attended = sum(item.attended for item in plan.scheduled)
        decodes = plan.num_tokens - prompt_tokens
        self.costs.measured(decodes, prompt_tokens, attended, max(seconds, 1e-6))
        self.chunks_total += len(chunks)
        cut = sum(not item.completes for item in chunks)
        self.overhead_seconds += cut * self.costs.fixed
        if cut and prompt_tokens != self.size:
            self.changes_total += 1
            self.size = prompt_tokens

    def _beside(self, items: tuple[ScheduledSequence, ...], start: int) -> int:
        """The largest size, in grains, whose step is expected to stay within the target."""
        if not self.costs.known:
            return FIRST
        attended = sum(item.attended for item in items)

        def seconds(grains: int) -> float:
            tokens = grains * GRAIN
            looks_back = attended + tokens * (start + tokens / 2)
            return self.costs.predict(len(items), tokens, looks_back)

        wanted = self._target / (1 + self.costs.error)
        most = (
            2 * max(self.size, FIRST) // GRAIN
        )  # what was measured says little of far larger ones
        grains = bisect_right(range(most + 1), wanted, key=seconds) - 1
        return max(FLOOR, grains * GRAIN)
