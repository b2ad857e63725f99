"""Request bodies: decoded strictly, with the offending field named."""

from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from litestar import Request

B = TypeVar("B", bound=msgspec.Struct)


async def read_body(kind: type[B], request: Request[Any, Any, Any]) -> B:
    """The JSON body as `kind`. Raises msgspec.ValidationError or msgspec.DecodeError."""
    body: B = _decoder(kind).decode(await request.body())
    return body


@lru_cache(maxsize=64)
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
