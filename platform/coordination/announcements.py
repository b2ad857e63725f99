"""What the processes of one installation tell each other, through Redis pub/sub.

An announcement only makes things faster: whoever misses one finds out by polling or expiry. It is
handled in the publishing process before `publish` returns.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar, cast

import msgspec
from redis.asyncio import Redis

from polyloom.platform.cancelling import being_cancelled
from polyloom.platform.coordination.live_state import LOST, RETRY_SECONDS, LiveState

log = logging.getLogger(__name__)

CHANNEL = "polyloom:announcements"
WAIT_SECONDS = 30.0


class RoutesChanged(msgspec.Struct, frozen=True, tag="routes"):
    """The routes are at `version` now."""

    version: int


class KeysChanged(msgspec.Struct, frozen=True, tag="keys"):
    """A key was revoked or a tenant changed: what is cached of keys is void."""


class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    """End a request, whichever process serves it, if it is the tenant's (a slug)."""

    tenant: str
    request_id: str


class CachesInvalidated(msgspec.Struct, frozen=True, tag="caches"):
    """The newest invalidation of prefix caches has this number now."""

    newest: int


Announcement = RoutesChanged | KeysChanged | CancelRequest | CachesInvalidated
Kind = TypeVar("Kind", RoutesChanged, KeysChanged, CancelRequest, CachesInvalidated)
Handler = Callable[[Announcement], Awaitable[None]]


class _Envelope(msgspec.Struct, frozen=True):
    """An announcement and the process that sent it, which has handled it already."""

    sender: str
    announcement: Announcement


class Announcements:
    """Publishes to all processes, and hands what arrives to this process's handlers."""

    def __init__(self, live: LiveState, sender: str) -> None:
        """sender: unique to this process."""
        self._live = live
        self._sender = sender
        self._handlers: dict[type, list[Handler]] = {}
        self._listener: asyncio.Task[None] | None = None

    def subscribe(self, kind: type[Kind], handler: Callable[[Kind], Awaitable[None]]) -> None:
        """Call `handler` with every announcement of `kind`, this process's own included."""
        self._handlers.setdefault(kind, []).append(cast(Handler, handler))

    async def publish(self, announcement: Announcement) -> None:
        """Tell everyone. A lost Redis is no error: the others find out by themselves."""
        await self._handle(announcement)
        message = msgspec.json.encode(_Envelope(self._sender, announcement))
        await self._live.run(lambda redis: _send(redis, message))

    async def start(self) -> None:
        """Listen to the other processes. Nothing to hear where Redis is embedded."""
        if self._live.server is not None:
            listening = asyncio.Event()
            self._listener = asyncio.create_task(self._listen(self._live.server, listening))
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_SECONDS):
                    await listening.wait()

    async def stop(self) -> None:
        """Stop listening."""
        if self._listener is not None:
            self._listener.cancel()
            with suppress(asyncio.CancelledError):
                await self._listener

    async def _listen(self, server: Redis, listening: asyncio.Event) -> None:
        while not being_cancelled():
            try:
                async with server.pubsub(ignore_subscribe_messages=True) as channel:
                    await channel.subscribe(CHANNEL)
                    self._live.found()
                    listening.set()
                    while not being_cancelled():
                        message = await channel.get_message(timeout=WAIT_SECONDS)
                        if message is not None:
                            await self._receive(message["data"])
            except LOST as error:
                self._live.lost(error)
                await asyncio.sleep(RETRY_SECONDS)

    async def _receive(self, data: bytes) -> None:
        try:
            envelope = msgspec.json.decode(data, type=_Envelope)
        except msgspec.DecodeError:
            log.warning("ignored an announcement of another version")
            return
        if envelope.sender != self._sender:
            await self._handle(envelope.announcement)

    async def _handle(self, announcement: Announcement) -> None:
        for handler in self._handlers.get(type(announcement), []):
            try:
                await handler(announcement)
            except Exception:
                log.exception("a handler of %s failed", type(announcement).__name__)


async def _send(redis: Redis, message: bytes) -> None:
    await redis.publish(CHANNEL, message)
