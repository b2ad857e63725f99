"""Heads in a running engine: whoever else is in the batch, each request drafts as it does alone."""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from polyloom.adapters.source import AdapterSource, DraftHeadSource
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.settings import EngineSettings
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


def test_mixes_of_adapters_heads_and_lengths_equal_each_alone(
    engine: Engine,
    heads: HeadMaker,
    request_factory: Make,
    run: Run,
    adapter_factory: Callable[..., AdapterSource],
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
    alone = [run(engine, [request(*mix[i])])[0] for i in order]
    together = run(engine, [request(*mix[i]) for i in order])
    for place, one, other in zip(order, alone, together, strict=True):
        _, source, drafts = mix[place]
        assert other.token_ids == one.token_ids
        counts = [(a.end.accepted_tokens, a.end.rejected_tokens) for a in (one, other)]
        assert counts[0] == counts[1]
        assert (sum(counts[0]) == 0) == (source is None or drafts == "off")
    assert len({tuple(answer.token_ids) for answer in together}) == len(adapters)
