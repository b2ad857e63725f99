"""Heads in a running engine: whoever else is in the batch, each request drafts as it does alone."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from polyloom.adapters.source import AdapterSource, DraftHeadSource
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.speculation.drafter import DraftRow, Proposal
from polyloom.platform.engine.step import Engine
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.request import GenerationRequest
from tests.platform.engine.draft_heads.conftest import HeadMaker

PROMPT = tuple(int(t) for t in np.random.default_rng(4).integers(3, 512, 19))
LOAD_SECONDS = 60

Run = Callable[[Engine, list[GenerationRequest]], list[Any]]
Make = Callable[..., GenerationRequest]


@pytest.fixture(scope="module")
def engine(settings_factory: Callable[..., EngineSettings]) -> Iterator[Engine]:
    """All prompts run in one step, so that all requests are drafted for from then on."""
    settings = settings_factory(drafters=("draft_head",), max_running=36, token_budget=1024)
    engine = build_engine(settings)
    yield engine
    engine.close()


def until_drafted(engine: Engine, run: Run, request: Callable[[], GenerationRequest]) -> None:
    """Heads are loaded beside the steps; until then there are no drafts."""
    give_up = time.monotonic() + LOAD_SECONDS
    while run(engine, [request()])[0].end.rejected_tokens == 0:
        assert time.monotonic() < give_up


def drafts_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[tuple[int, ...]]]:
    """All drafts from now on, by sequence, in their order."""
    (drafter,) = engine._speculator._drafters
    propose, drafted = drafter.propose, defaultdict(list)

    def noted(rows: Sequence[DraftRow]) -> list[Proposal]:
        proposals = propose(rows)
        for row, proposal in zip(rows, proposals, strict=True):
            drafted[row.sequence.sequence_id].append(proposal.tokens)
        return proposals

    monkeypatch.setattr(drafter, "propose", noted)
    return drafted


def test_mixes_of_adapters_heads_and_lengths_equal_each_alone(
    engine: Engine,
    heads: HeadMaker,
    request_factory: Make,
    run: Run,
    adapter_factory: Callable[..., AdapterSource],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapters = [None, adapter_factory(4, 0), adapter_factory(20, 1)]
    sources = [None, heads.source(None), heads.source("first"), heads.source("second")]
    policies: list[DraftPolicy] = ["off", 1, 3]
    mix = list(itertools.product(adapters, sources, policies))
    order = np.random.default_rng(1).permutation(len(mix))

    def request(
        adapter: AdapterSource | None, source: DraftHeadSource | None, drafts: DraftPolicy
    ) -> GenerationRequest:
        made = request_factory(PROMPT, adapter=adapter, max_tokens=10)
        digest = None if source is None else source.digest
        return msgspec.structs.replace(
            made,
            combination=msgspec.structs.replace(made.combination, head_digest=digest),
            draft_head=source,
            drafts=drafts,
        )

    for source in sources[1:]:
        until_drafted(engine, run, lambda source=source: request(None, source, 3))  # type: ignore[misc]
    drafted = drafts_of(engine, monkeypatch)
    alone = [request(*mix[i]) for i in order]
    answers = [run(engine, [each])[0] for each in alone]
    together = [request(*mix[i]) for i in order]
    mixed_answers = run(engine, together)
    assert len({tuple(answer.token_ids) for answer in answers}) == len(adapters)
    for place, one, mixed, answer, mixed_answer in zip(
        order, alone, together, answers, mixed_answers, strict=True
    ):
        _, source, drafts = mix[place]
        assert mixed_answer.token_ids == answer.token_ids
        assert drafted[mixed.sequence_id] == drafted[one.sequence_id]
        assert bool(drafted[one.sequence_id]) == (source is not None and drafts != "off")
