"""Several engines of one base behind the interface of one client.

A request goes where `routing.placement` says. With a single engine nothing is chosen and nothing is
added to its streams.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from polyloom.platform.engine.client import EngineClient
from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.engine.messages import (
    CacheReport,
    Finished,
    Invalidate,
    Snapshot,
    SpeculationReport,
    Status,
    Tokens,
    Welcome,
)
from polyloom.platform.engine.prefix import prompt_chain
from polyloom.platform.engine.totals import sum_snapshots, sum_statuses
from polyloom.routing.placement.choice import EngineView, Wish, choose
from polyloom.routing.request import GenerationRequest

Result = TypeVar("Result")

REMEMBERED = 16_384
"""Of each: blocks lately sent somewhere, and conversations."""


class EnginePool:
    """One object for all engines. Their processes belong to `EngineFleet`."""

    def __init__(self, engines: Sequence[EngineClient], *, block_size: int, kv_dtype: str) -> None:
        """block_size, kv_dtype: as the engines were started with."""
        self.engines = tuple(engines)
        self.block_size = block_size
        self._kv_dtype = kv_dtype
        self._views: Mapping[int, EngineView] = {}
        self._placed: list[OrderedDict[str, int]] = [OrderedDict(), OrderedDict()]

    def look_at(self, views: Mapping[int, EngineView]) -> None:
        """Take what is known of the engines, by index; an engine without a view has only its load."""
        self._views = views

    @property
    def welcome(self) -> Welcome | None:
        """Of the first engine that has answered: all are started alike."""
        return next((e.welcome for e in self.engines if e.welcome is not None), None)

    @property
    def last_status(self) -> Status | None:
        """Sums over the engines that are there."""
        statuses = [e.last_status for e in self.engines if e.healthy and e.last_status is not None]
        return sum_statuses(statuses) if statuses else None

    @property
    def status_age(self) -> float:
        """Seconds since the last heartbeat of any."""
        return min(e.status_age for e in self.engines)

    @property
    def healthy(self) -> bool:
        """Some engine is connected and its step loop turns."""
        return any(e.healthy for e in self.engines)

    @property
    def degraded(self) -> bool:
        """Some engine serves, and some does not."""
        return self.healthy and not all(e.healthy for e in self.engines)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Tokens | Finished]:
        """`EngineClient.generate` of the engine that is chosen now."""
        if len(self.engines) == 1:
            return self.engines[0].generate(request)
        return self.engines[self._place(request)].generate(request)

    async def abort(self, sequence_id: str) -> None:
        """End a sequence, on whichever engine it runs. Raises EngineUnavailableError."""
        for engine in self.engines:
            if engine.runs(sequence_id):
                await engine.abort(sequence_id)

    async def retire(self, adapter_digest: str) -> None:
        """On every engine; one that is away starts without the revision. Raises
        EngineUnavailableError if none is there."""
        await self._everywhere(lambda engine: engine.retire(adapter_digest))

    async def invalidate(self, command: Invalidate) -> None:
        """On every engine; one that is away has nothing cached. Raises EngineUnavailableError if
        none is there."""
        await self._everywhere(lambda engine: engine.invalidate(command))

    async def drain(self) -> None:
        """Have every engine finish what it has and exit."""
        await self._everywhere(lambda engine: engine.drain())

    async def snapshot(self) -> Snapshot:
        """Sums over the engines that answer. Raises EngineUnavailableError if none does."""
        return sum_snapshots(list((await self.snapshots()).values()))

    async def snapshots(self) -> dict[int, Snapshot]:
        """By engine. Raises EngineUnavailableError if none answers."""
        return await self._everywhere(lambda engine: engine.snapshot())

    async def cache_reports(self) -> dict[int, CacheReport]:
        """By engine. Raises EngineUnavailableError if none answers."""
        return await self._everywhere(lambda engine: engine.cache_report())

    async def speculation_reports(self) -> dict[int, SpeculationReport]:
        """By engine. Raises EngineUnavailableError if none answers."""
        return await self._everywhere(lambda engine: engine.speculation_report())

    async def _everywhere(
        self, ask: Callable[[EngineClient], Coroutine[Any, Any, Result]]
    ) -> dict[int, Result]:
        answers = await asyncio.gather(*map(ask, self.engines), return_exceptions=True)
        found, last_error = dict[int, Result](), EngineUnavailableError("no engine is running")
        for index, answer in enumerate(answers):
            if isinstance(answer, EngineUnavailableError):
                last_error = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[index] = answer
        if not found:
            raise last_error
        return found

    def _place(self, request: GenerationRequest) -> int:
        blocks, conversations = self._placed
        chain = prompt_chain(request, self._kv_dtype, self.block_size)
        conversation = None
        if request.conversation is not None:
            conversation = f"{request.tenant}/{request.conversation}"
        wish = Wish(
            chain=chain,
            adapter_digest=request.combination.adapter_digest,
            home=None if conversation is None else conversations.get(conversation),
            recent=blocks,
        )
        index = choose([self._view(i) for i in range(len(self.engines))], wish)
        if index is None:
            return 0  # its client says in its own words that it is away
        for block in chain:
            _remember(blocks, block, index)
        if conversation is not None:
            _remember(conversations, conversation, index)
        return index

    def _view(self, index: int) -> EngineView:
        engine, known = self.engines[index], self._views.get(index, EngineView())
        return EngineView(
            available=engine.healthy,
            load=max(engine.open_streams, known.load),
            hot=known.hot,
            resident=known.resident,
        )


def _remember(memory: OrderedDict[str, int], key: str, index: int) -> None:
    memory[key] = index
    memory.move_to_end(key)
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)
