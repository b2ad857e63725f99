"""Frames on their way to the API processes, none of which can hold up the step loop."""

from collections import deque
from dataclasses import dataclass, field

import msgspec
import zmq

from polyloom.platform.engine.messages import Event, Events

BACKLOG_BYTES = 16 * 2**20  # of one client that does not read; then its sequences are ended


@dataclass
class Peer:
    """One API process: what it could not take yet, and the sequences it submitted."""

    identity: bytes
    backlog: deque[bytes] = field(default_factory=deque)
    backlog_bytes: int = 0
    sequences: set[str] = field(default_factory=set)

    @property
    def overflowing(self) -> bool:
        return self.backlog_bytes > BACKLOG_BYTES


class PeerGoneError(Exception):
    """The peer's connection is closed."""


class Outbox:
    """Sends without waiting. `socket` is a ROUTER with ROUTER_MANDATORY set."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, peer: Peer, events: list[Event]) -> None:
        """Send one frame, or keep it until the peer reads. Raises PeerGoneError."""
        frame = self._encoder.encode(Events(tuple(events)))
        if peer.backlog or not self._try(peer, frame):
            peer.backlog.append(frame)
            peer.backlog_bytes += len(frame)

    def flush(self, peer: Peer) -> None:
        """Send what was kept, as far as the peer takes it. Raises PeerGoneError."""
        while peer.backlog and self._try(peer, peer.backlog[0]):
            peer.backlog_bytes -= len(peer.backlog.popleft())

    def _try(self, peer: Peer, frame: bytes) -> bool:
        try:
            self._socket.send_multipart([peer.identity, frame], zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGoneError from None
            raise
        return True
