"""An upload's body, streamed to disk: an archive, or a folder's files as multipart."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from litestar import Request
from multipart import (  # type: ignore[import-untyped]
    MultipartError,
    MultipartSegment,
    PushMultipartParser,
    parse_options_header,
)

from polyloom.adapters.artifact import Staging
from polyloom.platform.api.disconnect import body_from_client
from polyloom.platform.errors import InvalidRequest

ARCHIVE_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".zip")
MAX_PARTS = 2_000

Part = Any
"""A part's head (MultipartSegment), a piece of its content (bytes), or its end (None)."""


async def receive_upload(request: Request[Any, Any, Any], staging: Staging) -> None:
    """Fill `staging` from the body. Raises what Staging raises, InvalidRequest for a multipart
    body that is malformed, and ClientGone."""
    with body_from_client():
        await _receive(request, staging)


async def _receive(request: Request[Any, Any, Any], staging: Staging) -> None:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != "multipart/form-data":
        await staging.receive_archive(request.stream(), kind or None)
        return
    boundary = options.get("boundary")
    if not boundary:
        raise InvalidRequest("multipart without a boundary", param="content-type")
    try:
        await _receive_parts(request.stream(), boundary, staging)
    except MultipartError as error:
        raise InvalidRequest(f"malformed multipart body: {error}") from error


async def _receive_parts(body: AsyncIterator[bytes], boundary: str, staging: Staging) -> None:
    async with aclosing(_parts(body, boundary)) as parts:
        async for part in parts:
            if not isinstance(part, MultipartSegment) or not part.filename:
                continue  # content of a part that nobody wants
            if part.filename.lower().endswith(ARCHIVE_SUFFIXES):
                await staging.receive_archive(_content(parts), part.content_type)
                return
            await staging.receive_file(part.filename, _content(parts))
    staging.finish_files()


async def _parts(body: AsyncIterator[bytes], boundary: str) -> AsyncGenerator[Part, None]:
    with PushMultipartParser(boundary, max_segment_count=MAX_PARTS) as parser:
        async for chunk in body:
            for part in parser.parse(chunk):
                yield part


async def _content(parts: AsyncGenerator[Part, None]) -> AsyncGenerator[bytes, None]:
    """Content of the part whose head was just read."""
    async for part in parts:
        if part is None:
            return
        if isinstance(part, bytes | bytearray):
            yield bytes(part)
