"""Server-sent events that notice a client that left, wait for a slow one and keep a queued one."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.response.base import ASGIResponse
from litestar.types import HTTPResponseBodyEvent, Receive, Scope, Send

from polyloom.platform.api.disconnect import ClientGone, until_disconnect
from polyloom.platform.api.problems import problem_of

KEEP_ALIVE_SECONDS = 15.0
HEAD_PATIENCE_SECONDS = 5.0
"""How long the status line waits for the first event, so that an early error has its own status."""

_encoder = msgspec.json.Encoder()
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


def sse(event: msgspec.Struct) -> bytes:
    """One event as it stands on the wire."""
    return b"data: " + _encoder.encode(event) + b"\n\n"


class EventStream(Response[bytes]):
    """`events` (frames made by `sse`) as the answer, then `[DONE]`.

    limit: seconds after which a stream whose reader hangs is cut.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: dict[str, str], limit: float
    ) -> None:
        super().__init__(b"", headers=headers, media_type="text/event-stream")
        self._events = events
        self._limit = limit

    def to_asgi_response(
        self, app: Any, request: Request[Any, Any, Any], **_: Any
    ) -> "ASGIEventStream":
        """The stream itself."""
        headers = {name: str(value) for name, value in self.headers.items()}
        return ASGIEventStream(self._events, headers, self._limit)


class ASGIEventStream(ASGIResponse):
    """Writes events as they come.

    The status line waits for the first event, a few seconds at most: an error before it is raised
    from here and gets its own status. A later error becomes an event of the stream.
    """

    _should_set_content_length = False

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: dict[str, str], limit: float
    ) -> None:
        headers |= {"cache-control": "no-store", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type="text/event-stream")
        self._events = events
        self._limit = limit
        self._started = False
        self._sent_at = 0.0
        self._sending = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop as soon as the client is gone. The events are closed after."""
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(ClientGone, TimeoutError):
                async with asyncio.timeout(self._limit):
                    await until_disconnect(receive, asyncio.ensure_future(self._write(send)))

    async def _write(self, send: Send) -> None:
        keeper = asyncio.create_task(self._keep_alive(send))
        try:
            more = True
            while more:
                body, more = await self._next()
                await self._send(send, body, more)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def _next(self) -> tuple[bytes, bool]:
        """What to write next, and whether more follows. Raises what comes before the status line."""
        try:
            event = await anext(self._events, None)
        except Exception as error:
            if not self._started:
                raise
            return sse(problem_of(error).body) + _DONE, False
        return (_DONE, False) if event is None else (event, True)

    async def _keep_alive(self, send: Send) -> None:
        """Send the status line of a request that waits, and a comment after every long silence."""
        await asyncio.sleep(HEAD_PATIENCE_SECONDS)
        await self._send(send, b"")
        while True:
            silent = time.monotonic() - self._sent_at
            if silent < KEEP_ALIVE_SECONDS:
                await asyncio.sleep(KEEP_ALIVE_SECONDS - silent)
            else:
                await self._send(send, _KEEP_ALIVE)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        """One part whole, behind the status line."""
        async with self._sending:
            if not self._started:
                self._started = True
                await self.start_response(send)
            self._sent_at = time.monotonic()
            part: HTTPResponseBodyEvent = {
                "type": "http.response.body",
                "body": body,
                "more_body": more,
            }
            await send(part)
