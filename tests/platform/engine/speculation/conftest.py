"""Drafters for tests, and sequences to draft for."""

import itertools
from collections.abc import Callable, Sequence

import pytest

from polyloom.platform.engine.speculation.drafter import DraftRow, Proposal
from polyloom.platform.engine.speculation.speculator import Speculator
from polyloom.platform.engine.step import Engine
from polyloom.routing.combination import Combination
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams
from polyloom.routing.scheduler.sequence import Sequence as Scheduled

_ids = itertools.count()


class ScriptedDrafter:
    """Proposes what a function of the tokens and the wanted length says."""

    needs_hidden = False

    def __init__(
        self,
        propose: Callable[[Sequence[int], int], Sequence[int]],
        *,
        name: str = "scripted",
        looks_up: bool = True,
        confidence: float = 0.9,
    ) -> None:
        self.name, self.looks_up, self.confidence = name, looks_up, confidence
        self.asked = 0
        self.closed: list[str] = []
        self._script = propose

    def serves(self, sequence: Scheduled) -> bool:
        return True

    def propose(self, rows: Sequence[DraftRow]) -> list[Proposal]:
        self.asked += 1
        drafts = [tuple(self._script(row.sequence.tokens, row.length)) for row in rows]
        return [Proposal(draft, (self.confidence,) * len(draft)) for draft in drafts]

    def close(self, sequence_id: str) -> None:
        self.closed.append(sequence_id)


@pytest.fixture(scope="session")
def scripted() -> type[ScriptedDrafter]:
    return ScriptedDrafter


@pytest.fixture(scope="session")
def speculate() -> Callable[..., Engine]:
    """Gives an engine other drafters than its settings name."""

    def change(engine: Engine, *drafters: ScriptedDrafter) -> Engine:
        budget = engine._batcher.config.token_budget
        engine._speculator = Speculator(drafters, engine._blocks, budget)
        return engine

    return change


@pytest.fixture(scope="session")
def decoding() -> Callable[..., Scheduled]:
    """A sequence with `prompt` and `output`, its last token not run yet."""

    def make(
        prompt: Sequence[int] = (5, 6, 7),
        output: Sequence[int] = (8,),
        drafts: DraftPolicy = "adaptive",
        domain: str = "",
        temperature: float = 0.0,
    ) -> Scheduled:
        request = GenerationRequest(
            sequence_id=f"draft-{next(_ids)}",
            tenant="tenant",
            combination=Combination("sha256:tiny", "sha256:template"),
            adapter=None,
            prompt=tuple(prompt),
            sampling=SamplingParams(max_tokens=1000, seed=0, temperature=temperature),
            drafts=drafts,
            domain=domain,
        )
        sequence = Scheduled(request, arrival=0.0)
        sequence.tokens += output
        sequence.computed = len(sequence.tokens) - 1
        return sequence

    return make
