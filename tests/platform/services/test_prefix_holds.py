"""Held prefixes where there are no prefix caches: refused, and nobody keeps trying."""

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import pytest

from polyloom.platform.engine.messages import CacheReport, Finished, Status, Tokens
from polyloom.platform.errors import Conflict
from polyloom.platform.generation.held_prefixes import HeldRequest
from polyloom.platform.services.prefix_holds import PrefixHolds
from polyloom.platform.services.views import TenantView
from polyloom.routing.combination import Combination
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams

if TYPE_CHECKING:
    from conftest import Process


class Engine:
    """Notes the prefills that it is asked for; all of it is a pool of one, too."""

    block_size = 16
    last_status: Status | None = None

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    @property
    def engines(self) -> list["Engine"]:
        return [self]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Tokens | Finished]:
        self.asked.append(request.hold)
        return
        yield

    async def release_prefix(self, hold: str) -> None:
        """Nothing is held."""

    async def cache_reports(self) -> dict[int, CacheReport]:
        report = CacheReport(
            boot="boot",
            namespaces=(),
            hot=(),
            holds=(),
            checked_hits=0,
            cross_namespace_hits=0,
        )
        return {0: report}


class Planner:
    async def plan(self, tenant: TenantView, hold: int, held: HeldRequest) -> GenerationRequest:
        return GenerationRequest(
            sequence_id="",
            tenant=tenant.slug,
            combination=Combination("sha256:b", "none"),
            adapter=None,
            prompt=(1,) * 40,
            sampling=SamplingParams(max_tokens=1, seed=0),
            hold=f"hold-{hold}-x",
        )


async def test_without_caches_a_hold_is_refused_and_older_ones_stay_cold(
    process: "Process",
) -> None:
    acme, engine = await process.tenant(), Engine()
    held = HeldRequest(model="tiny", prompt="Be brief.")
    caching, without = (
        PrefixHolds(process.database, engine, Planner(), caching=on) for on in (True, False)
    )
    await caching.add(acme, "old", held, author="key:1")
    await caching.look()
    assert len(engine.asked) == 2
    await without.look()
    with pytest.raises(Conflict, match="prefix-cache set to false"):
        await without.add(acme, "new", held, author="key:1")
    (old,) = await without.list(acme)
    assert (old.name, old.engines) == ("old", 0)
    assert old.failure is not None and "prefix-cache" in old.failure
    assert await without.end_all(acme, author="key:1") == 1
    assert len(engine.asked) == 2
