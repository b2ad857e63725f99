"""Length-prefixed msgpack frames over a byte stream."""

import struct
from typing import BinaryIO, TypeVar

import msgspec

LENGTH = struct.Struct(">I")

T = TypeVar("T")


def pack(message: msgspec.Struct) -> bytes:
    """One frame."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's body; None when the stream has ended."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None
