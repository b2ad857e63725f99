"""Retiring a revision: out of the record first, then out of the engine."""

import logging
from collections.abc import Awaitable
from typing import Protocol

from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.services.adapters import AdapterRegistry
from polyloom.platform.services.views import RevisionView

log = logging.getLogger(__name__)


class UnloadingEngine(Protocol):
    """What retirement needs of `EngineClient`."""

    def retire(self, adapter_digest: str) -> Awaitable[None]:
        """Unload a revision once no sequence holds it. Raises EngineUnavailableError."""
        ...


class Retirement:
    """Takes revisions out of service."""

    def __init__(self, registry: AdapterRegistry, engine: UnloadingEngine) -> None:
        self._registry = registry
        self._engine = engine

    async def retire(
        self, tenant_id: int, adapter: str, number: int, *, author: str
    ) -> RevisionView:
        """Retire, and unload the content unless another live revision has the same. Raises
        NotFound."""
        view = await self._registry.retire(tenant_id, adapter, number, author=author)
        await self._unload(view.digest)
        return view

    async def quarantine(self, digest: str) -> None:
        """Take every revision of a content out of service whose stored files have changed."""
        views = await self._registry.quarantine(digest, "the stored files are not what they were")
        for view in views:
            log.error("%s of %s is quarantined: its files changed", view.label, view.tenant)

    async def _unload(self, digest: str) -> None:
        if await self._registry.is_live(digest):
            return
        try:
            await self._engine.retire(digest)
        except EngineUnavailableError:
            log.info("%s is not unloaded: the engine is away and will start without it", digest)
