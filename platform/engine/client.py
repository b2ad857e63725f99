"""The API process's side of the engine's socket.

One socket, one reader task and one watcher for the whole process; a stream is an entry in a
dictionary, so idle ones cost nothing. Tokens of a stream whose reader is slow are merged rather
than queued one by one, and the socket is always read, so one slow reader delays nobody.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from polyloom.platform.engine.errors import (
    EngineRefusedError,
    EngineUnavailableError,
)
from polyloom.platform.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    CacheReport,
    Command,
    Drain,
    Event,
    Events,
    Finished,
    GetCacheReport,
    GetSnapshot,
    GetSpeculationReport,
    Hello,
    Invalidate,
    Refused,
    ReleasePrefix,
    Retire,
    Snapshot,
    SpeculationReport,
    Status,
    Submit,
    Tokens,
    Welcome,
)
from polyloom.platform.engine.stream import TokenStream
from polyloom.routing.request import GenerationRequest

logger = logging.getLogger("polyloom.engine.client")

Answer = TypeVar("Answer", Snapshot, CacheReport, SpeculationReport)

UNREAD_LIMIT = 8192  # tokens that one stream's reader may leave unread
HEALTHY_SECONDS = 5.0  # ten missed heartbeats
ANSWER_SECONDS = 10.0


class EngineClient:
    """Speaks to one engine, through its restarts. Made by `connect`, ended by `close`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.welcome: Welcome | None = None
        self.last_status: Status | None = None
        self._status_at = 0.0
        self._ready = asyncio.Event()
        self._streams: dict[str, TokenStream] = {}
        self._snapshots: deque[asyncio.Future[Snapshot]] = deque()
        self._cache_reports: deque[asyncio.Future[CacheReport]] = deque()
        self._speculation_reports: deque[asyncio.Future[SpeculationReport]] = deque()
        self._refusal: str | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Events)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Nothing is kept for an engine that is not there: what a lost one was sent is lost.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        # An engine busy with a step is sent everything all the same: an abort that found a full
        # queue would leave its sequence running. The requests in flight bound what can wait.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(address)
        self._tasks = (
            asyncio.create_task(self._read(), name="engine-client-read"),
            asyncio.create_task(self._watch(), name="engine-client-watch"),
        )

    @classmethod
    async def connect(cls, address: str, timeout: float = 60.0) -> "EngineClient":
        """A client whose engine has answered.

        Raises:
            EngineUnavailableError: no answer within `timeout` seconds.
        """
        client = cls(address)
        try:
            await client.wait_ready(timeout)
        except BaseException:
            await client.close()
            raise
        return client

    async def wait_ready(self, timeout: float) -> Welcome:
        """Wait until the engine answers; raises EngineUnavailableError if it does not in time."""
        try:
            async with asyncio.timeout(timeout):
                await self._ready.wait()
        except TimeoutError:
            reason = self._refusal or f"no engine answers at {self.address}"
            raise EngineUnavailableError(reason) from None
        assert self.welcome is not None
        return self.welcome

    async def close(self) -> None:
        """End all streams with EngineUnavailableError and let go of the socket."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lose("the engine client is closed")
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    @property
    def status_age(self) -> float:
        """Seconds since the last heartbeat; infinite before the first of this connection."""
        return time.monotonic() - self._status_at if self._status_at else float("inf")

    @property
    def healthy(self) -> bool:
        """The engine is connected and its step loop turns."""
        return self._ready.is_set() and self.status_age < HEALTHY_SECONDS

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    def runs(self, sequence_id: str) -> bool:
        """Whether a stream of this sequence is open here."""
        return sequence_id in self._streams

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Tokens | Finished]:
        """Run one sequence; the last item is `Finished`.

        Closing the generator early (use `contextlib.aclosing`), or cancelling its reader, aborts
        the sequence in the engine.

        Raises:
            EngineUnavailableError: the engine is not there, or was lost meanwhile.
            EngineRefusedError: the engine did not take the request.
            SlowReaderError: more than UNREAD_LIMIT tokens were left unread.
        """
        sequence_id = request.sequence_id
        if sequence_id in self._streams:
            raise EngineRefusedError("invalid_request", f"sequence {sequence_id!r} exists already")
        stream = TokenStream(sequence_id, UNREAD_LIMIT)
        self._streams[sequence_id] = stream
        try:
            await self._submit(request, stream)
            while True:
                event = await stream.next()
                yield event
                if isinstance(event, Finished):
                    return
        finally:
            del self._streams[sequence_id]
            if not stream.over:
                with contextlib.suppress(EngineUnavailableError):
                    await self._send(Abort(sequence_id))

    async def abort(self, sequence_id: str) -> None:
        """End a sequence; its stream gets `Finished(reason="abort")`."""
        await self._send(Abort(sequence_id))

    async def retire(self, adapter_digest: str) -> None:
        """Have a revision unloaded once no sequence holds it."""
        await self._send(Retire(adapter_digest))

    async def drain(self) -> None:
        """Have the engine finish what it has and exit."""
        await self._send(Drain())

    async def snapshot(self) -> Snapshot:
        """Everything the engine holds now. Raises EngineUnavailableError."""
        return await self._ask(GetSnapshot(), self._snapshots)

    async def cache_report(self) -> CacheReport:
        """What the prefix cache did and holds. Raises EngineUnavailableError."""
        return await self._ask(GetCacheReport(), self._cache_reports)

    async def speculation_report(self) -> SpeculationReport:
        """What drafts brought and cost. Raises EngineUnavailableError."""
        return await self._ask(GetSpeculationReport(), self._speculation_reports)

    async def invalidate(self, command: Invalidate) -> None:
        """Make cached blocks unreachable. Raises EngineUnavailableError."""
        await self._send(command)

    async def release_prefix(self, hold: str) -> None:
        """Let the blocks held under this id be evicted. Raises EngineUnavailableError."""
        await self._send(ReleasePrefix(hold))

    async def _ask(self, command: Command, waiting: deque[asyncio.Future[Answer]]) -> Answer:
        """Answers of one kind come in the order of their questions."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        await self._send(command)
        waiting.append(answer)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return await answer
        except TimeoutError:
            raise EngineUnavailableError("the engine does not answer") from None

    async def _submit(self, request: GenerationRequest, stream: TokenStream) -> None:
        try:
            await self._send(Submit(request))
        except EngineUnavailableError as error:
            stream.fail(error)
            raise

    async def _send(self, command: Command) -> None:
        if not self._ready.is_set():
            raise EngineUnavailableError("the engine is not running")
        await self._send_now(command)

    async def _send_now(self, command: Command) -> None:
        try:
            await self._socket.send(self._encoder.encode(command), zmq.NOBLOCK)
        except zmq.Again:
            raise EngineUnavailableError("the engine does not take commands") from None

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._socket.recv()
                for event in self._decoder.decode(frame).events:
                    await self._dispatch(event)
        except (msgspec.DecodeError, zmq.ZMQError) as error:
            logger.exception("the engine's events cannot be read")
            self._lose(f"the engine's events cannot be read: {error}")

    async def _dispatch(self, event: Event) -> None:
        match event:
            case Tokens():
                stream = self._streams.get(event.sequence_id)
                if stream is not None and not stream.put(event):
                    with contextlib.suppress(EngineUnavailableError):
                        await self._send(Abort(event.sequence_id))
            case Finished():
                stream = self._streams.get(event.sequence_id)
                if stream is not None:
                    stream.finish(event)
            case Refused():
                self._refused(event)
            case Status():
                self.last_status, self._status_at = event, time.monotonic()
            case Welcome():
                self.welcome = event
                self._status_at = time.monotonic()
                self._ready.set()
            case Snapshot():
                _answer(self._snapshots, event)
            case CacheReport():
                _answer(self._cache_reports, event)
            case SpeculationReport():
                _answer(self._speculation_reports, event)

    def _refused(self, event: Refused) -> None:
        stream = self._streams.get(event.sequence_id)
        if stream is not None:
            stream.fail(EngineRefusedError(event.code, event.message, event.retry_after))
        elif not event.sequence_id:
            self._refusal = event.message
            logger.error("the engine refuses this process: %s", event.message)

    async def _watch(self) -> None:
        """Greet every engine that connects; fail what runs when it goes."""
        while True:
            message = await recv_monitor_message(self._monitor)
            if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                with contextlib.suppress(EngineUnavailableError):
                    await self._send_now(Hello(PROTOCOL_VERSION))
            elif message["event"] == zmq.EVENT_DISCONNECTED:
                self._lose("the engine was lost")

    def _lose(self, reason: str) -> None:
        self._ready.clear()
        self._status_at = 0.0
        for stream in self._streams.values():
            stream.fail(EngineUnavailableError(reason))
        _fail(self._snapshots, reason)
        _fail(self._cache_reports, reason)
        _fail(self._speculation_reports, reason)


def _answer(waiting: deque[asyncio.Future[Answer]], event: Answer) -> None:
    """For whoever asked first; one that has given up keeps its place."""
    answer = waiting.popleft()
    if not answer.done():
        answer.set_result(event)


def _fail(waiting: deque[asyncio.Future[Answer]], reason: str) -> None:
    """Nobody will answer these questions."""
    while waiting:
        answer = waiting.popleft()
        if not answer.done():
            answer.set_exception(EngineUnavailableError(reason))
