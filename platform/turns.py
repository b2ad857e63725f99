"""Turns at what all tenants share and only a few can have at a time."""

import asyncio
from weakref import WeakValueDictionary


class Turns:
    """A lock for each tenant. Who holds it before waiting for what is shared keeps others of the
    same tenant out of that queue: however many come, one waits there."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, tenant: str) -> asyncio.Lock:
        """The tenant's; it lasts as long as somebody uses it."""
        return self._locks.setdefault(tenant, asyncio.Lock())
