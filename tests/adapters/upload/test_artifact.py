"""Uploads of every shape are received; what is unsafe is refused by name and leaves nothing."""

import asyncio
import gzip
import io
import os
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyloom.adapters.artifact import ArtifactLimits, Staging
from polyloom.adapters.errors import AdapterError, InvalidAdapterError, TooLargeError

CONFIG = ("adapter_config.json", b'{"peft_type": "LORA"}')
WEIGHTS = ("adapter_model.safetensors", os.urandom(40_000))
SMALL = ArtifactLimits(
    upload_bytes=200_000,
    unpacked_bytes=400_000,
    ratio=10,
    ratio_floor_bytes=50_000,
    entries=20,
    text_bytes=30_000,
)
TAR, GZIP, ZIP = "application/x-tar", "application/gzip", "application/zip"

Receive = Callable[..., Any]


@pytest.fixture
def receive(tmp_path: Path, stream: Callable[[bytes], AsyncIterator[bytes]]) -> Receive:
    """Receive a body; what it held by name. The parent folder must be empty afterwards."""
    parent = tmp_path / "staging"

    async def run(
        body: bytes, content_type: str | None = None, limits: ArtifactLimits = SMALL
    ) -> dict[str, bytes]:
        try:
            with Staging(parent, limits) as staging:
                await staging.receive_archive(stream(body), content_type)
                kept = {p.name: p.read_bytes() for p in staging.folder.iterdir()}
                modes = {stat.S_IMODE(p.stat().st_mode) for p in staging.folder.iterdir()}
                assert modes <= {0o600}
                return kept
        finally:
            assert list(parent.iterdir()) == []
            assert [p.name for p in tmp_path.iterdir()] == ["staging"]

    return run


async def refused(receive: Receive, body: bytes, **options: Any) -> InvalidAdapterError:
    with pytest.raises(InvalidAdapterError) as caught:
        await receive(body, **options)
    return caught.value


@pytest.mark.parametrize("content_type", [None, "application/octet-stream", "right"])
@pytest.mark.parametrize("prefix", ["", "./", "my-adapter/", "./my-adapter/"])
async def test_every_kind_is_received(
    receive: Receive,
    make_tar: Callable[..., bytes],
    make_zip: Callable[..., bytes],
    prefix: str,
    content_type: str | None,
) -> None:
    files = [(prefix + name, data) for name, data in (CONFIG, WEIGHTS)]
    bodies = {TAR: make_tar(files), GZIP: make_tar(files, "w:gz"), ZIP: make_zip(files)}
    for kind, body in bodies.items():
        declared = kind if content_type == "right" else content_type
        assert await receive(body, content_type=declared) == dict([CONFIG, WEIGHTS])


async def test_only_an_adapters_files_are_kept(
    receive: Receive, make_tar: Callable[..., bytes]
) -> None:
    kept = ["tokenizer.json", "chat_template.jinja", "special_tokens_map.json"]
    dropped = [
        "README.md",
        "optimizer.pt",
        "training_args.bin",
        "inner.zip",
        "._adapter_config.json",
        ".DS_Store",
        "__MACOSX/._x",
        "checkpoint-5/adapter_config.json",
        "checkpoint-5/adapter_model.safetensors",
        "script.py",
    ]
    files = [CONFIG, WEIGHTS, *((name, b"{}") for name in kept + dropped)]
    received = await receive(make_tar(files))
    assert set(received) == {CONFIG[0], WEIGHTS[0], *kept}
    assert received[CONFIG[0]] == CONFIG[1]


async def test_a_content_type_that_lies_is_refused(
    receive: Receive, make_tar: Callable[..., bytes]
) -> None:
    error = await refused(receive, make_tar([CONFIG, WEIGHTS]), content_type=ZIP)
    assert error.param == "content-type"


@pytest.mark.parametrize("body", [b"", b"hello", b"\x00" * 4096, b"\x80\x05pickle"])
async def test_what_is_no_archive_is_refused(receive: Receive, body: bytes) -> None:
    assert (await refused(receive, body)).param == "upload"


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../adapter_config.json",
        "a/../../x",
        "a/..",
        "..\\x",
        "C:/x",
        "c:x",
        "a\nb",
        "//server/x",
    ],
)
async def test_paths_that_leave_the_folder(
    receive: Receive,
    make_tar: Callable[..., bytes],
    make_zip: Callable[..., bytes],
    name: str,
) -> None:
    files = [CONFIG, WEIGHTS, (name, b"x")]
    assert (await refused(receive, make_tar(files))).param == repr(name)
    assert (await refused(receive, make_zip(files))).param == repr(name)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"),
        (tarfile.FIFOTYPE, "fifo"),
        (tarfile.CONTTYPE, "special entry"),
    ],
)
@pytest.mark.parametrize("name", ["adapter_model.safetensors", "README.md"])
async def test_tar_entries_that_are_no_files(
    receive: Receive, kind: bytes, said: str, name: str
) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    error = await refused(receive, out.getvalue())
    assert error.param == name
    assert said in error.message


async def test_a_link_in_a_zip(receive: Receive) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        info = zipfile.ZipInfo("adapter_model.safetensors")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(info, "/etc/passwd")
    assert "symbolic link" in (await refused(receive, out.getvalue())).message


@pytest.mark.parametrize(
    "second", ["adapter_config.json", "./adapter_config.json", "ADAPTER_config.json"]
)
async def test_one_name_twice(
    receive: Receive, make_tar: Callable[..., bytes], second: str
) -> None:
    error = await refused(receive, make_tar([CONFIG, WEIGHTS, (second, b"{}")]))
    assert "twice" in error.message


async def test_names_that_unicode_holds_equal(
    receive: Receive, make_tar: Callable[..., bytes]
) -> None:
    files = [CONFIG, WEIGHTS, ("caf\u00e9", b""), ("cafe\u0301", b"")]
    assert "twice" in (await refused(receive, make_tar(files))).message


async def test_too_many_entries(
    receive: Receive, make_tar: Callable[..., bytes], make_zip: Callable[..., bytes]
) -> None:
    files = [CONFIG, WEIGHTS, *((f"note-{i}.txt", b"") for i in range(30))]
    assert "20 entries" in (await refused(receive, make_tar(files))).message
    assert "20 entries" in (await refused(receive, make_zip(files))).message


async def test_bombs_by_ratio(
    receive: Receive, make_tar: Callable[..., bytes], make_zip: Callable[..., bytes]
) -> None:
    files = [CONFIG, (WEIGHTS[0], bytes(300_000))]
    for body in (make_tar(files, "w:gz"), make_zip(files)):
        assert "10 times" in (await refused(receive, body)).message


async def test_bombs_by_size(
    receive: Receive, make_tar: Callable[..., bytes], make_zip: Callable[..., bytes]
) -> None:
    loose = ArtifactLimits(unpacked_bytes=100_000, ratio=10**9)
    files = [CONFIG, (WEIGHTS[0], bytes(300_000))]
    for body in (make_tar(files, "w:gz"), make_zip(files)):
        with pytest.raises(TooLargeError):
            await receive(body, limits=loose)


async def test_a_bomb_in_a_file_that_would_be_dropped(receive: Receive) -> None:
    """A gzip stream is unpacked whole before anyone can know what is in it."""
    body = gzip.compress(bytes(300_000))
    assert "10 times" in (await refused(receive, body)).message


async def test_a_zip_that_understates_its_sizes(
    receive: Receive, make_zip: Callable[..., bytes]
) -> None:
    body = make_zip([CONFIG, (WEIGHTS[0], bytes(300_000))])
    lying = body.replace((300_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))
    assert lying != body
    with pytest.raises(AdapterError):
        await receive(lying)


async def test_an_upload_over_its_limit(receive: Receive, make_tar: Callable[..., bytes]) -> None:
    with pytest.raises(TooLargeError) as caught:
        await receive(make_tar([CONFIG, (WEIGHTS[0], os.urandom(300_000))]))
    assert caught.value.limit == SMALL.upload_bytes


async def test_a_text_file_over_its_limit(receive: Receive, make_tar: Callable[..., bytes]) -> None:
    with pytest.raises(TooLargeError) as caught:
        await receive(make_tar([(CONFIG[0], os.urandom(31_000)), WEIGHTS]))
    assert caught.value.param == CONFIG[0]


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "pkl", "ckpt"])
async def test_pickles_are_refused_with_advice(
    receive: Receive, make_tar: Callable[..., bytes], suffix: str
) -> None:
    for files in (
        [CONFIG, (f"adapter_model.{suffix}", b"\x80\x05")],
        [CONFIG, WEIGHTS, (f"adapter_model.{suffix}", b"\x80\x05")],
        [CONFIG, (f"model.{suffix}", b"\x80\x05")],
    ):
        error = await refused(receive, make_tar(files))
        assert error.param == files[-1][0]
        assert "save_file" in error.message


async def test_what_an_adapter_needs(receive: Receive, make_tar: Callable[..., bytes]) -> None:
    assert (await refused(receive, make_tar([WEIGHTS]))).param == CONFIG[0]
    assert (await refused(receive, make_tar([CONFIG]))).param == WEIGHTS[0]
    deep = [(f"a/b/{name}", data) for name, data in (CONFIG, WEIGHTS)]
    assert "deeper" in (await refused(receive, make_tar(deep))).message
    two = [(f"{top}/{name}", data) for top in "ab" for name, data in (CONFIG, WEIGHTS)]
    assert "second one" in (await refused(receive, make_tar(two))).message


@pytest.mark.parametrize("kind", ["w", "w:gz", "zip"])
async def test_cut_off_anywhere(
    receive: Receive,
    make_tar: Callable[..., bytes],
    make_zip: Callable[..., bytes],
    kind: str,
) -> None:
    files = [CONFIG, WEIGHTS]
    body = make_zip(files) if kind == "zip" else make_tar(files, kind)
    for keep in (0.1, 0.4, 0.7):
        with pytest.raises(InvalidAdapterError):
            await receive(body[: int(len(body) * keep)])


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files are on a device that has no room."""

    def make(*, prefix: str, dir: Path) -> tuple[int, str]:  # noqa: A002
        return os.open("/dev/full", os.O_WRONLY), str(dir / f"{prefix}full")

    monkeypatch.setattr(tempfile, "mkstemp", make)


@pytest.mark.usefixtures("full_disk")
async def test_a_full_disk_is_not_the_archives_fault(
    receive: Receive, make_tar: Callable[..., bytes]
) -> None:
    with pytest.raises(OSError, match="No space left"):
        await receive(gzip.compress(make_tar([CONFIG, WEIGHTS])))


async def test_a_huge_tar_header_is_not_read_into_memory(receive: Receive) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 100_000
    body = info.tobuf(tarfile.PAX_FORMAT) + bytes(102_400)
    assert "oversized" in (await refused(receive, body)).message


def _sparse_header() -> bytes:
    """GNU's old form, which says that another block of its map follows; none does."""
    info = tarfile.TarInfo("adapter_model.safetensors")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[482] = 1
    return _summed(header)


def _summed(header: bytearray) -> bytes:
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _endless_size() -> bytes:
    header = bytearray(tarfile.TarInfo("adapter_config.json").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\x80" + b"\x7f" + b"\xff" * 10
    return _summed(header)


def _pax(fields: dict[str, str]) -> bytes:
    info = tarfile.TarInfo("adapter_model.safetensors")
    info.pax_headers = fields
    return info.tobuf(tarfile.PAX_FORMAT)


@pytest.mark.parametrize(
    "body",
    [
        _pax({"GNU.sparse.map": "a,b"}),
        _pax({"GNU.sparse.size": "abc"}),
        _pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "x"}),
        _sparse_header(),
        _endless_size(),
    ],
)
async def test_a_tar_whose_headers_make_no_sense(receive: Receive, body: bytes) -> None:
    assert (await refused(receive, body)).param == "upload"


async def test_a_zip_whose_members_lie_nowhere(
    receive: Receive, make_zip: Callable[..., bytes]
) -> None:
    body = bytearray(make_zip([CONFIG, WEIGHTS]))
    directory, end = body.find(b"PK\x01\x02"), body.find(b"PK\x05\x06")
    body[end + 16 : end + 20] = (directory + 60).to_bytes(4, "little")  # it begins before the file
    assert (await refused(receive, bytes(body))).param == CONFIG[0]


async def test_an_encrypted_zip_and_a_zip64(
    receive: Receive, make_zip: Callable[..., bytes]
) -> None:
    body = bytearray(make_zip([CONFIG, WEIGHTS]))
    directory = body.find(b"PK\x01\x02")
    body[directory + 8] |= 1
    assert "encrypted" in (await refused(receive, bytes(body))).message
    end = body.find(b"PK\x05\x06")
    body[end:end] = b"PK\x06\x07" + bytes(16)
    assert "zip64" in (await refused(receive, bytes(body))).message


async def test_files_one_by_one(
    tmp_path: Path, stream: Callable[[bytes], AsyncIterator[bytes]]
) -> None:
    parent = tmp_path / "staging"
    with Staging(parent, SMALL) as staging:
        for name, data in (CONFIG, WEIGHTS, ("README.md", b"#"), ("._x", b"x")):
            await staging.receive_file(f"folder/{name}", stream(data))
        staging.finish_files()
        assert {p.name for p in staging.folder.iterdir()} == {CONFIG[0], WEIGHTS[0]}
        with pytest.raises(InvalidAdapterError, match="twice"):
            await staging.receive_file(CONFIG[0], stream(b"{}"))
        with pytest.raises(InvalidAdapterError, match="relative path"):
            await staging.receive_file("../x", stream(b"{}"))
        with pytest.raises(TooLargeError):
            await staging.receive_file("notes.txt", stream(bytes(300_000)))
    assert list(parent.iterdir()) == []


async def test_the_result_moves_out(
    tmp_path: Path, make_tar: Callable[..., bytes], stream: Callable[..., AsyncIterator[bytes]]
) -> None:
    with Staging(tmp_path / "staging", SMALL) as staging:
        await staging.receive_archive(stream(make_tar([CONFIG, WEIGHTS])), TAR)
        staging.move_to(tmp_path / "blob")
    assert (tmp_path / "blob" / CONFIG[0]).read_bytes() == CONFIG[1]
    assert list((tmp_path / "staging").iterdir()) == []


async def test_a_client_that_goes_away_leaves_nothing(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"x" * 1_000
        begun.set()
        await asyncio.Event().wait()

    async def upload() -> None:
        with Staging(tmp_path, SMALL) as staging:
            await staging.receive_archive(endless(), None)

    task = asyncio.create_task(upload())
    await begun.wait()
    assert list(tmp_path.iterdir()) != []
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(tmp_path.iterdir()) == []


PARTS = st.one_of(
    st.sampled_from(["..", ".", "", "a", "adapter_config.json", "/", "\\", "C:", "~", "\x00"]),
    st.text(max_size=6),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=st.lists(PARTS, max_size=5), data=st.binary(max_size=64))
def test_no_name_writes_outside(
    parts: list[str],
    data: bytes,
    tmp_path: Path,
    make_zip: Callable[..., bytes],
    stream: Callable[[bytes], AsyncIterator[bytes]],
) -> None:
    """Whatever a member is called, only allow-listed names appear, and only in the folder."""
    name = "/".join(parts).encode("utf-8", "replace").decode()
    parent = tmp_path / "staging"

    async def run() -> None:
        with Staging(parent, SMALL) as staging:
            try:
                body = make_zip([("top/" + CONFIG[0], b"{}"), ("top/" + WEIGHTS[0], b"w")])
                body = _with_member(body, name, data)
                await staging.receive_archive(stream(body), None)
            except InvalidAdapterError:
                return
            names = {p.name for p in staging.folder.rglob("*")}
            assert names <= {CONFIG[0], WEIGHTS[0]}

    asyncio.run(run())
    assert list(parent.iterdir()) == []
    assert [p.name for p in tmp_path.iterdir()] == ["staging"]


def _with_member(body: bytes, name: str, data: bytes) -> bytes:
    out = io.BytesIO(body)
    with zipfile.ZipFile(out, "a") as archive:
        info = zipfile.ZipInfo("placeholder")
        info.filename = info.orig_filename = name
        archive.writestr(info, data)
    return out.getvalue()
