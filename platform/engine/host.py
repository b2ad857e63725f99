"""The engine's single-threaded loop between its socket and its steps."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable

import msgspec
import zmq

from polyloom.platform.engine.errors import EngineError
from polyloom.platform.engine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Command,
    Drain,
    Event,
    Finished,
    GetCacheReport,
    GetSnapshot,
    GetSpeculationReport,
    Hello,
    Invalidate,
    Refused,
    ReleasePrefix,
    Retire,
    Submit,
    Welcome,
)
from polyloom.platform.engine.outbox import Outbox, Peer, PeerGoneError
from polyloom.platform.engine.step import Engine

logger = logging.getLogger("polyloom.engine")

HEARTBEAT_SECONDS = 0.5
LOAD_POLL_SECONDS = 0.002  # while everything waits for adapters
BACKLOG_POLL_SECONDS = 0.01


class HostSocket:
    """The socket that API processes connect to, and the thread that moves its bytes."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.zmq = self._context.socket(zmq.ROUTER)
        self.zmq.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.zmq.setsockopt(zmq.LINGER, 200)  # ms, for the last events of a drain

    def close(self) -> None:
        """Let go of the socket; its file stays."""
        self.zmq.close()
        self._context.term()


class EngineHost:
    """Serves one engine to API processes until it has drained or `stopped` says so.

    stopped: asked at every heartbeat; True ends the loop at once.
    """

    def __init__(
        self,
        engine: Engine,
        base_digest: str,
        socket: HostSocket,
        address: str,
        stopped: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._base_digest = base_digest
        self._stopped = stopped
        self._draining = False
        self._peers: dict[bytes, Peer] = {}
        self._owners: dict[str, Peer] = {}
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._socket = socket.zmq
        self._socket.bind(address)
        self._outbox = Outbox(self._socket)

    def drain(self) -> None:
        """Finish what runs, then leave `run`. Safe to call from a signal handler."""
        self._draining = True

    def run(self) -> None:
        """The loop. Raises EngineError if steps keep failing or something leaked."""
        checked, next_heartbeat = True, 0.0
        while True:
            self._read_commands()
            if self._draining:
                self._engine.drain()
            events = self._engine.step() if self._engine.has_work else []
            self._deliver(events)
            if self._engine.broken:
                raise EngineError("steps keep failing")
            busy = self._engine.has_work
            checked = checked and not busy
            now = time.monotonic()
            if now >= next_heartbeat:
                if self._stopped():
                    return
                if not busy:
                    self._engine.settle()
                if not busy and not checked:
                    self._engine.check_idle()
                    checked = True
                self._broadcast(self._engine.status())
                next_heartbeat = now + HEARTBEAT_SECONDS
            if not busy and self._draining:
                return
            self._wait(bool(events), next_heartbeat - now)

    def _wait(self, progressed: bool, until_heartbeat: float) -> None:
        """Sleep until a command comes or there is something to do."""
        if self._engine.has_work and progressed:
            return
        seconds = LOAD_POLL_SECONDS if self._engine.has_work else until_heartbeat
        if any(peer.backlog for peer in self._peers.values()):
            seconds = min(seconds, BACKLOG_POLL_SECONDS)
        self._socket.poll(max(1, int(seconds * 1000)), zmq.POLLIN)

    def _read_commands(self) -> None:
        while True:
            try:
                identity, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                command: Command = self._decoder.decode(frame)
            except msgspec.DecodeError as error:
                logger.error("a command cannot be read: %s", error)
                peer = self._peers.get(identity, Peer(identity))
                self._send(peer, [Refused("", "invalid_request", f"cannot read: {error}")])
                continue
            self._obey(identity, command)

    def _obey(self, identity: bytes, command: Command) -> None:
        if isinstance(command, Hello):
            self._greet(identity, command)
            return
        peer = self._peers.get(identity)
        if peer is None:
            refusal = Refused("", "invalid_request", "the first command must be hello")
            self._send(Peer(identity), [refusal])
            return
        match command:
            case Submit(request):
                refused = self._engine.submit(request)
                if refused is not None:
                    self._send(peer, [refused])
                else:
                    self._owners[request.sequence_id] = peer
                    peer.sequences.add(request.sequence_id)
            case Abort(sequence_id):
                finished = (
                    self._engine.abort(sequence_id) if sequence_id in peer.sequences else None
                )
                if finished is not None:
                    self._deliver([finished])
            case Retire(adapter_digest):
                self._engine.retire(adapter_digest)
            case Invalidate():
                self._engine.invalidate(command)
            case ReleasePrefix(hold):
                self._engine.release_prefix(hold)
            case GetCacheReport():
                self._send(peer, [self._engine.cache_report()])
            case GetSpeculationReport():
                self._send(peer, [self._engine.speculation_report()])
            case GetSnapshot():
                self._send(peer, [self._engine.snapshot()])
            case Drain():
                self._draining = True

    def _greet(self, identity: bytes, hello: Hello) -> None:
        peer = Peer(identity)
        if hello.version != PROTOCOL_VERSION:
            message = f"this engine speaks version {PROTOCOL_VERSION}, not {hello.version}"
            self._send(peer, [Refused("", "invalid_request", message)])
            return
        self._peers[identity] = peer
        max_model_len = self._engine.max_model_len
        welcome = Welcome(
            version=PROTOCOL_VERSION,
            base_digest=self._base_digest,
            max_model_len=max_model_len,
            max_prompt_tokens=max_model_len - 1,
            capabilities=self._engine.capabilities(),
        )
        self._send(peer, [welcome, self._engine.status()])

    def _deliver(self, events: list[Event]) -> None:
        """Each event to the process that submitted its sequence, in one frame a process."""
        by_peer: defaultdict[bytes, list[Event]] = defaultdict(list)
        for event in events:
            sequence_id = getattr(event, "sequence_id", "")
            peer = self._owners.get(sequence_id)
            if peer is None:
                continue
            by_peer[peer.identity].append(event)
            if isinstance(event, Finished):
                del self._owners[sequence_id]
                peer.sequences.discard(sequence_id)
        for identity, batch in by_peer.items():
            self._send(self._peers[identity], batch)

    def _broadcast(self, event: Event) -> None:
        for peer in tuple(self._peers.values()):
            self._send(peer, [event])

    def _send(self, peer: Peer, events: list[Event]) -> None:
        try:
            self._outbox.flush(peer)
            self._outbox.send(peer, events)
        except PeerGoneError:
            self._forget(peer)
            return
        if peer.overflowing:
            self._cut_off(peer)

    def _forget(self, peer: Peer) -> None:
        """An API process is gone: nobody waits for its sequences."""
        self._end_sequences(peer)
        self._peers.pop(peer.identity, None)

    def _cut_off(self, peer: Peer) -> None:
        """An API process does not read: when it does again, all it learns is that they ended."""
        logger.warning("a client does not read; %d sequences are ended", len(peer.sequences))
        finished = self._end_sequences(peer)
        peer.backlog.clear()
        peer.backlog_bytes = 0
        if finished:
            self._send(peer, list(finished))

    def _end_sequences(self, peer: Peer) -> list[Finished]:
        ended = []
        for sequence_id in peer.sequences:
            self._owners.pop(sequence_id, None)
            finished = self._engine.abort(sequence_id)
            if finished is not None:
                ended.append(finished)
        peer.sequences.clear()
        return ended
