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


def decode_as(kind: type[B], raw: msgspec.Raw, param: str) -> B:
    """A part of a body. Raises InvalidRequest naming the field below `param`."""
    try:
        part: B = _decoder(kind).decode(raw)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from None
    except RecursionError:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from None
    return part


@lru_cache(maxsize=64)
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
