"""Request bodies: decoded strictly, with the offending field named."""

from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from litestar import Request

from polyloom.platform.api.disconnect import body_from_client
from polyloom.platform.errors import InvalidRequest

B = TypeVar("B", bound=msgspec.Struct)


async def read_body(kind: type[B], request: Request[Any, Any, Any]) -> B:
    """The JSON body as `kind`. Raises msgspec.ValidationError, msgspec.DecodeError or
    InvalidRequest (nested too deeply), ClientGone."""
    with body_from_client():
        content = await request.body()
    try:
        body: B = _decoder(kind).decode(content)
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    return body


@lru_cache(maxsize=64)
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
