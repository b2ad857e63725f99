"""Work that only goes on while somebody waits for it."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar

from litestar.exceptions import InternalServerException
from litestar.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


@contextmanager
def body_from_client() -> Generator[None]:
    """Around the reading of a body: ClientGone for a client that leaves before its end, which is
    no fault of the server's, although Litestar calls it one."""
    try:
        yield
    except InternalServerException as error:
        raise ClientGone("the client left before the end of its body") from error


async def until_disconnect(receive: Receive, work: asyncio.Future[T]) -> T:
    """The result of `work`, unless the client leaves first: then it is cancelled and ClientGone
    raised. The request's body must have been read."""
    gone = asyncio.ensure_future(_disconnected(receive))
    both: set[asyncio.Future[Any]] = {work, gone}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        raise ClientGone("the client left")
    finally:
        for task in both:
            task.cancel()
        await asyncio.gather(*both, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
