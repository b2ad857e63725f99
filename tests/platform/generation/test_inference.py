"""What the engine is told about who asks."""

from datetime import UTC, datetime
from types import MappingProxyType
from unittest.mock import Mock

import pytest

from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.held_prefixes import HeldRequest, HoldPlanner
from polyloom.platform.generation.inference import Inference, Prompt
from polyloom.platform.generation.request_plan import ServedModel
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.platform.services.views import TenantLimits, TenantView
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams
from polyloom.routing.snapshot import BaseEntry, RouteSnapshot

BASE = BaseEntry("tiny", "sha256:" + "b" * 64, "/bases/tiny", "sha256:template")


class OneFormat:
    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._format = ChatTemplate(tokenizer, None)

    async def get(self, resolution: object) -> ChatTemplate:
        return self._format


TENANT = TenantView(
    id=1,
    slug="acme",
    state="active",
    limits=TenantLimits(),
    created_at=datetime.now(UTC),
    weight=2.5,
)


def inference_of(tokenizer: TextTokenizer) -> Inference:
    return Inference(
        routes=lambda: RouteSnapshot(1, bases=MappingProxyType({"tiny": BASE})),
        served=lambda: ServedModel(100, 99),
        formats=OneFormat(tokenizer),  # type: ignore[arg-type]
        deadline=60.0,
        **{
            name: Mock()
            for name in ("engine", "grammars", "rate_limits", "usage", "metrics", "cache")
        },
        announcements=Mock(),
    )


async def sequences(tokenizer: TextTokenizer, session: str | None) -> tuple[GenerationRequest, ...]:
    inference = inference_of(tokenizer)
    target = await inference.target(TENANT, 1, "tiny", "completions", session=session)
    prompt = Prompt((1, 2), SamplingParams(max_tokens=3, seed=0))
    return inference.call(target, [prompt], 2, ()).plan.sequences


async def test_a_sequence_says_its_tenant_s_weight_and_its_conversation(
    byte_level: TextTokenizer,
) -> None:
    first = await sequences(byte_level, "a session " * 1000)
    again = await sequences(byte_level, "a session " * 1000)
    other = await sequences(byte_level, "another")
    conversations = {s.conversation for s in (*first, *again)}
    assert len(conversations) == 1
    assert {s.conversation for s in other}.isdisjoint(conversations)
    assert all(len(name or "") == 32 for name in conversations)
    assert all((s.tenant, s.weight) == ("acme", 2.5) for s in first)


async def test_a_request_without_a_session_is_no_conversation(byte_level: TextTokenizer) -> None:
    assert [s.conversation for s in await sequences(byte_level, None)] == [None, None]


async def test_what_no_cache_block_holds_is_not_held(byte_level: TextTokenizer) -> None:
    planner = HoldPlanner(inference_of(byte_level), block_size=16)
    request = await planner.plan(TENANT, 1, HeldRequest(model="tiny", prompt=[5] * 16))
    assert request.prompt == (5,) * 16
    for length in (0, 15, 100):
        with pytest.raises(InvalidRequest) as raised:
            await planner.plan(TENANT, 1, HeldRequest(model="tiny", prompt=[5] * length))
        assert raised.value.param == "prompt"
