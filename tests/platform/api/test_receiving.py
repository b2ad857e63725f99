"""Multipart bodies, whatever the pieces that the network cuts them into."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from litestar.exceptions import InternalServerException

from polyloom.adapters.artifact import ArtifactLimits, Staging
from polyloom.platform.api.disconnect import ClientGone
from polyloom.platform.api.receiving import receive_upload
from polyloom.platform.errors import InvalidRequest

FILES = {
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "README.md": b"nobody needs this",
    "adapter_model.safetensors": bytes(range(256)) * 9 + b"\r\n--",
}


class Body:
    """A request as far as `receive_upload` looks at it."""

    leaves = False

    def __init__(self, content: bytes, content_type: str, cut: int) -> None:
        self.headers = {"content-type": content_type}
        self._content, self._cut = content, cut

    async def stream(self) -> AsyncGenerator[bytes, None]:
        for start in range(0, len(self._content), self._cut):
            yield self._content[start : start + self._cut]
        if self.leaves:
            raise InternalServerException("client disconnected prematurely")  # Litestar's own
        yield b""


async def receive(body: Body, parent: Path) -> dict[str, bytes]:
    with Staging(parent, ArtifactLimits()) as staging:
        await receive_upload(cast(Any, body), staging)
        return {path.name: path.read_bytes() for path in staging.folder.iterdir()}


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cut=st.integers(1, 3000))
async def test_files_arrive_whole(tmp_path: Path, cut: int) -> None:
    request = httpx.Request("POST", "http://x/", files=[("f", item) for item in FILES.items()])
    body = Body(request.read(), request.headers["content-type"], cut)
    wanted = {name: data for name, data in FILES.items() if name != "README.md"}
    assert await receive(body, tmp_path) == wanted


async def test_a_malformed_body_is_the_client_s_fault(tmp_path: Path) -> None:
    for kind in ("multipart/form-data; boundary=b", "multipart/form-data"):
        with pytest.raises(InvalidRequest):
            await receive(Body(b"--b\r\nbroken", kind, 5), tmp_path)


@pytest.mark.parametrize("kind", ["application/x-tar", "multipart/form-data; boundary=b"])
async def test_a_client_that_leaves_midway_is_no_fault_of_the_server(
    tmp_path: Path, kind: str
) -> None:
    body = Body(b"--b\r\n", kind, 2)
    body.leaves = True
    with pytest.raises(ClientGone):
        await receive(body, tmp_path)
    assert list(tmp_path.iterdir()) == []
