"""Draft heads in the record: numbers, promotion, what a request drafts with, and how they end."""

from typing import TYPE_CHECKING

import pytest

from polyloom.adapters.source import DraftHeadSource
from polyloom.platform.errors import Conflict, NotFound, QuotaExceeded
from polyloom.platform.services.draft_heads import (
    BaseOwner,
    DraftHeadRegistry,
    HeadOwner,
    RecordedHead,
    RevisionOwner,
)
from polyloom.platform.services.views import DraftHeadContent
from polyloom.routing.resolver import resolve

if TYPE_CHECKING:
    from conftest import Process

BASE = BaseOwner("sha256:" + "b" * 64)


def digest(letter: str) -> str:
    return "sha256:" + letter * 64


class Unloaded:
    """An engine that notes what it is told to unload."""

    def __init__(self) -> None:
        self.digests: list[str] = []

    async def retire(self, adapter_digest: str) -> None:
        self.digests.append(adapter_digest)


class Heads:
    """The registry of one process, and uploads of contents that are nothing but a letter."""

    def __init__(self, process: "Process") -> None:
        self.engine = Unloaded()
        self.blobs = process.blobs
        self.registry = DraftHeadRegistry(
            process.database,
            process.blobs,
            self.engine,
            process.snapshots.routes_changed,
            clock=process.time,
        )

    async def upload(
        self, owner: HeadOwner, letter: str, shared: str | None = None, *, promote: bool = True
    ) -> RecordedHead:
        with self.blobs.staging() as staged:
            folder = staged / "content"
            folder.mkdir()
            (folder / "model.safetensors").write_text(letter)
            content = DraftHeadContent(
                digest=digest(letter),
                folder=str(folder),
                bytes=100,
                shared_digest=None if shared is None else digest(shared),
                rank=None if shared is None else 8,
                drafts=3,
                training=None,
            )
            return await self.registry.record(owner, content, author="key:1", promote=promote)


@pytest.fixture
def heads(process: "Process") -> Heads:
    return Heads(process)


def drafting(process: "Process", model: str) -> DraftHeadSource | None:
    """What a request to `model` drafts with; its combination must name the same."""
    found = resolve(process.snapshots.current, "acme", model)
    expected = None if found.draft_head is None else found.draft_head.digest
    assert found.combination.head_digest == expected
    return found.draft_head


async def test_a_request_drafts_with_its_own_head_or_the_shared_one(
    process: "Process", heads: Heads
) -> None:
    acme = await process.tenant()
    await process.ready(acme, "a")
    own = RevisionOwner(acme.id, "support", 1)
    assert drafting(process, "support@1") is None
    await heads.upload(BASE, "1")
    for model in ("tiny", "support@1"):
        head = drafting(process, model)
        assert head is not None and head.digest == digest("1") and head.delta is None
    await heads.upload(own, "2", "1")
    head = drafting(process, "support@1")
    assert head is not None and head.digest == digest("2")
    assert head.shared.digest == digest("1")
    assert head.delta is not None and head.delta.path == str(process.blobs.path(digest("2")))
    shared = drafting(process, "tiny")
    assert shared is not None and shared.digest == digest("1")
    second = await heads.upload(own, "3", "1", promote=False)
    assert (second.view.number, second.view.promoted) == (2, False)
    assert (found := drafting(process, "support@1")) and found.digest == digest("2")
    await heads.registry.promote(own, 2, author="key:1")
    assert (found := drafting(process, "support@1")) and found.digest == digest("3")
    assert [(v.number, v.promoted) for v in await heads.registry.list(own)] == [
        (2, True),
        (1, False),
    ]


async def test_content_that_is_there_is_that_head(process: "Process", heads: Heads) -> None:
    first = await heads.upload(BASE, "1", promote=False)
    again = await heads.upload(BASE, "1", promote=True)
    assert first.created and not again.created
    assert again.view.number == 1 and again.view.promoted


async def test_a_retired_head_gives_way_to_the_shared_one(process: "Process", heads: Heads) -> None:
    acme = await process.tenant()
    await process.ready(acme, "a")
    own = RevisionOwner(acme.id, "support", 1)
    await heads.upload(BASE, "1")
    await heads.upload(own, "2", "1")
    view = await heads.registry.retire(own, 1, author="key:1")
    assert (view.state, view.promoted) == ("retired", False)
    assert heads.engine.digests == [digest("2")]
    assert (found := drafting(process, "support@1")) and found.digest == digest("1")
    assert (await heads.registry.retire(own, 1, author="key:1")).ended_at == view.ended_at
    with pytest.raises(Conflict, match="retired"):
        await heads.registry.promote(own, 1, author="key:1")
    with pytest.raises(NotFound):
        await heads.registry.promote(own, 2, author="key:1")


async def test_a_shared_head_takes_its_deltas_along(process: "Process", heads: Heads) -> None:
    acme = await process.tenant()
    await process.ready(acme, "a")
    own = RevisionOwner(acme.id, "support", 1)
    await heads.upload(BASE, "1")
    await heads.upload(own, "2", "1")
    await heads.registry.retire(BASE, 1, author="operator")
    assert drafting(process, "support@1") is None
    assert [v.state for v in await heads.registry.list(own)] == ["retired"]
    with pytest.raises(Conflict, match="was retired"):
        await heads.upload(own, "3", "1")


async def test_a_revisions_end_is_its_heads(process: "Process", heads: Heads) -> None:
    acme = await process.tenant()
    await process.ready(acme, "a")
    own = RevisionOwner(acme.id, "support", 1)
    await heads.upload(BASE, "1")
    await heads.upload(own, "2", "1")
    await process.registry.retire(acme.id, "support", 1, author="key:1")
    assert [v.state for v in await heads.registry.list(own)] == ["retired"]
    with pytest.raises(Conflict, match="cannot have draft heads"):
        await heads.upload(own, "3", "1")
    process.time.now += 601
    await process.keeper.collect()
    assert not process.blobs.holds(digest("2"))
    assert process.blobs.holds(digest("1"))  # the shared one is in use


async def test_heads_count_as_storage_and_belong_to_a_tenant(
    process: "Process", heads: Heads
) -> None:
    acme = await process.tenant(storage_bytes=250)
    other = await process.tenant("other")
    await process.ready(acme, "a")
    await heads.upload(BASE, "1")
    await heads.upload(RevisionOwner(acme.id, "support", 1), "2", "1")
    with pytest.raises(QuotaExceeded):
        await heads.upload(RevisionOwner(acme.id, "support", 1), "3", "1")
    with pytest.raises(NotFound):
        await heads.registry.list(RevisionOwner(other.id, "support", 1))
