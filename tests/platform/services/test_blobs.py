"""The blob store: whole folders in, whole folders out, and what a crash left is swept."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from polyloom.platform.services import blobs
from polyloom.platform.services.blobs import BlobStore

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "data")


def staged(folder: Path, text: str) -> Path:
    content = folder / "content"
    content.mkdir()
    (content / "file").write_text(text)
    return content


async def test_a_folder_moves_in_and_out(store: BlobStore, tmp_path: Path) -> None:
    with store.staging() as folder:
        content = staged(folder, "a")
        await store.flush(content)
        store.put(DIGEST, content)
        (folder / "left over").write_text("x")
    assert store.holds(DIGEST)
    assert (store.path(DIGEST) / "file").read_text() == "a"
    assert list((tmp_path / "data" / "staging").iterdir()) == []
    store.take_out(DIGEST)
    store.take_out(DIGEST)
    await store.empty_trash()
    assert not store.holds(DIGEST)
    assert list((tmp_path / "data" / "staging").iterdir()) == []


def test_what_a_crash_left_makes_way(store: BlobStore) -> None:
    for text in ("old", "new"):
        with store.staging() as folder:
            store.put(DIGEST, staged(folder, text))
    assert (store.path(DIGEST) / "file").read_text() == "new"


def test_an_upload_that_fails_leaves_nothing(store: BlobStore, tmp_path: Path) -> None:
    with pytest.raises(KeyError), store.staging() as folder:
        staged(folder, "a")
        raise KeyError
    assert list((tmp_path / "data" / "staging").iterdir()) == []


async def test_orphans_are_swept_once_they_are_old(store: BlobStore) -> None:
    other = "sha256:" + "f" * 64
    for digest in (DIGEST, other):
        with store.staging() as folder:
            store.put(digest, staged(folder, digest))
    assert await store.sweep([DIGEST], min_age=3_600) == 0
    assert await store.sweep([DIGEST], min_age=0) == 1
    assert store.holds(DIGEST) and not store.holds(other)


async def test_a_staged_upload_is_as_old_as_what_was_written_to_it_last(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.staging() as folder:
        content = staged(folder, "a")
        begun = folder.stat().st_ctime
        monkeypatch.setattr(blobs, "_ctime", lambda path: begun + 50 * (path == content / "file"))
        monkeypatch.setattr(blobs, "time", SimpleNamespace(time=lambda: begun + 100))
        assert await store.sweep([], min_age=60) == 0
        assert await store.sweep([], min_age=50) == 1


@pytest.mark.parametrize("digest", ["", "sha256:", "../x", "sha256:../" + "0" * 61, "0" * 64])
def test_only_digests_name_blobs(store: BlobStore, digest: str) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        store.path(digest)
