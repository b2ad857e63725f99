"""The API process's side of the socket, against an engine that does not read."""

import asyncio
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from polyloom.platform.engine.client import EngineClient
from polyloom.platform.engine.messages import PROTOCOL_VERSION, Abort, Command, Events, Welcome

MANY = 20_000
"""More than the queues of two sockets hold by themselves."""


async def test_no_abort_is_lost_to_an_engine_that_is_busy(tmp_path: Path) -> None:
    """A step may be long, and many clients may leave meanwhile."""
    address = f"ipc://{tmp_path}/engine"
    context = zmq.asyncio.Context()
    engine = context.socket(zmq.ROUTER)
    engine.bind(address)
    try:
        connecting = asyncio.create_task(EngineClient.connect(address))
        identity, _ = await engine.recv_multipart()
        welcome = Events((Welcome(PROTOCOL_VERSION, "sha256:0", 16, 15, ()),))
        await engine.send_multipart([identity, msgspec.msgpack.encode(welcome)])
        client = await connecting
        for number in range(MANY):
            await client.abort(str(number))
        decoder = msgspec.msgpack.Decoder(Command)
        received = [decoder.decode((await engine.recv_multipart())[1]) for _ in range(MANY)]
        assert received == [Abort(str(number)) for number in range(MANY)]
        await client.close()
    finally:
        engine.close(linger=0)
        context.term()
