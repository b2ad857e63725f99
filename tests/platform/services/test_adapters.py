"""The registry: numbers, states, blobs and limits, alone and under concurrency."""

import asyncio
from typing import TYPE_CHECKING

import pytest

from polyloom.platform.db.repositories import TenantRepository
from polyloom.platform.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from polyloom.platform.services.blob_keeper import BlobKeeper
from polyloom.platform.services.views import FidelityVerdict

if TYPE_CHECKING:
    from conftest import Process

BASE = "sha256:" + "b" * 64
PASSED = FidelityVerdict(max_logprob_diff=1e-5)
FAILED = FidelityVerdict(max_logprob_diff=0.5, failure="0.5 is over the bound")


async def test_revisions_are_numbered_per_adapter(process: "Process") -> None:
    acme = await process.tenant()
    first, created = await process.upload(acme, "a")
    second, _ = await process.upload(acme, "b")
    other, _ = await process.upload(acme, "a", "brand:voice/v1")
    assert (first.number, second.number, other.number) == (1, 2, 1)
    assert created and first.state == "checking" and first.label == "support@1"
    assert (process.blobs.path(first.digest) / "adapter_model.safetensors").read_text() == "a"
    view = await process.registry.get(acme.id, "support")
    assert [revision.number for revision in view.revisions] == [2, 1]
    assert [a.name for a in await process.registry.list(acme.id)] == ["brand:voice/v1", "support"]


async def test_the_same_content_is_the_same_revision(process: "Process") -> None:
    acme = await process.tenant()
    first, _ = await process.upload(acme, "a")
    await process.registry.settle(first.id, PASSED)
    again, created = await process.upload(acme, "a")
    assert (again.number, again.state, created) == (1, "ready", False)


async def test_content_that_failed_is_checked_anew(process: "Process") -> None:
    acme = await process.tenant()
    first, _ = await process.upload(acme, "a")
    await process.registry.settle(first.id, FAILED)
    again, created = await process.upload(acme, "a")
    assert (again.number, again.state, created) == (2, "checking", True)


async def test_uploads_at_once_get_distinct_numbers(process: "Process") -> None:
    acme = await process.tenant()
    begun = await asyncio.gather(*(process.upload(acme, f"content {i}") for i in range(12)))
    assert sorted(revision.number for revision, _ in begun) == list(range(1, 13))


async def test_one_content_at_once_is_one_revision(process: "Process") -> None:
    acme, globex = await process.tenant(), await process.tenant("globex")
    begun = await asyncio.gather(
        *(process.upload(acme, "same") for _ in range(6)),
        *(process.upload(globex, "same") for _ in range(6)),
    )
    assert sum(created for _, created in begun) == 2
    assert {revision.number for revision, _ in begun} == {1}


async def test_only_a_ready_revision_can_be_promoted(process: "Process") -> None:
    acme = await process.tenant()
    await process.upload(acme, "a")
    with pytest.raises(Conflict, match="revision 1 is checking"):
        await process.aliases.move(acme.id, "support", "prod", 1, author="key:1")


async def test_promotion_waits_for_ready(process: "Process") -> None:
    acme = await process.tenant()
    revision, _ = await process.upload(acme, "a", promote="prod")
    with pytest.raises(NotFound):
        await process.aliases.get(acme.id, "support", "prod")
    ready = await process.registry.settle(revision.id, PASSED)
    assert (ready.state, ready.max_logprob_diff) == ("ready", 1e-5)
    assert (await process.aliases.get(acme.id, "support", "prod")).number == 1


async def test_a_late_check_does_not_take_an_alias_back(process: "Process") -> None:
    acme = await process.tenant()
    first, _ = await process.upload(acme, "a", promote="prod")
    second, _ = await process.upload(acme, "b", promote="prod")
    await process.registry.settle(second.id, PASSED)
    await process.registry.settle(first.id, PASSED)
    assert (await process.aliases.get(acme.id, "support", "prod")).number == 2


async def test_a_failed_revision_is_never_promoted(process: "Process") -> None:
    acme = await process.tenant()
    revision, _ = await process.upload(acme, "a", promote="prod")
    failed = await process.registry.settle(revision.id, FAILED)
    assert (failed.state, failed.failure) == ("failed", "0.5 is over the bound")
    with pytest.raises(NotFound):
        await process.aliases.get(acme.id, "support", "prod")
    with pytest.raises(Conflict):
        await process.registry.settle(revision.id, PASSED)


async def test_a_verdict_after_retirement_is_refused(process: "Process") -> None:
    acme = await process.tenant()
    revision, _ = await process.upload(acme, "a", promote="prod")
    await process.registry.retire(acme.id, "support", 1, author="key:1")
    with pytest.raises(Conflict, match="is retired"):
        await process.registry.settle(revision.id, PASSED)


async def test_retiring_and_settling_at_once_ends_retired(process: "Process") -> None:
    acme = await process.tenant()
    for number in range(1, 6):
        revision, _ = await process.upload(acme, f"content {number}")
        await asyncio.gather(
            process.registry.settle(revision.id, PASSED),
            process.registry.retire(acme.id, "support", number, author="key:1"),
            return_exceptions=True,
        )
        assert (await process.registry.revision(acme.id, "support", number)).state == "retired"


async def test_a_blob_goes_with_its_last_revision_after_the_grace(process: "Process") -> None:
    acme, globex = await process.tenant(), await process.tenant("globex")
    revision = await process.ready(acme, "shared")
    await process.ready(globex, "shared")
    await process.registry.retire(acme.id, "support", 1, author="key:1")
    await process.registry.retire(acme.id, "support", 1, author="key:1")
    assert await process.registry.is_live(revision.digest)
    process.time.now += 1_000
    assert await process.keeper.collect() == 0
    await process.registry.retire(globex.id, "support", 1, author="key:2")
    assert not await process.registry.is_live(revision.digest)
    process.time.now += 599
    assert await process.keeper.collect() == 0
    process.time.now += 2
    assert await process.keeper.collect() == 1
    assert not process.blobs.path(revision.digest).exists()
    assert (await process.registry.revision(acme.id, "support", 1)).state == "retired"


async def test_collected_content_can_come_back(process: "Process") -> None:
    acme = await process.tenant()
    await process.ready(acme, "a")
    await process.registry.retire(acme.id, "support", 1, author="key:1")
    assert await process.keeper.collect(grace=0) == 1
    again, created = await process.upload(acme, "a")
    assert created and again.number == 2
    assert process.blobs.holds(again.digest)


async def test_quarantine_takes_every_tenants_copy_out(process: "Process") -> None:
    acme, globex = await process.tenant(), await process.tenant("globex")
    revision = await process.ready(acme, "shared")
    await process.ready(globex, "shared")
    bystander = await process.ready(acme, "other")
    taken = await process.registry.quarantine(revision.digest, "checksum differs")
    assert {(view.tenant, view.state) for view in taken} == {
        ("acme", "quarantined"),
        ("globex", "quarantined"),
    }
    assert not process.blobs.holds(revision.digest)
    assert (await process.registry.revision(acme.id, "support", bystander.number)).state == "ready"
    again, created = await process.upload(acme, "shared")
    assert created and process.blobs.holds(again.digest)


async def test_limits_of_adapters_and_storage(process: "Process") -> None:
    acme = await process.tenant(adapters=1, storage_bytes=250)
    await process.upload(acme, "a", size=100)
    with pytest.raises(QuotaExceeded, match="1 adapters"):
        await process.upload(acme, "b", "second", size=100)
    await process.upload(acme, "b", size=150)
    with pytest.raises(QuotaExceeded, match="250 bytes"):
        await process.upload(acme, "c", size=1)
    await process.registry.retire(acme.id, "support", 1, author="key:1")
    await process.upload(acme, "c", size=100)


async def test_a_refused_upload_leaves_nothing(process: "Process") -> None:
    acme = await process.tenant(storage_bytes=10)
    with pytest.raises(QuotaExceeded):
        await process.upload(acme, "a", size=11)
    assert await process.registry.list(acme.id) == ()
    assert await process.keeper.sweep(0) == 0


@pytest.mark.parametrize("name", ["", "a@b", "-a", "a b", "é", "x" * 129, "a\n"])
async def test_bad_names_are_refused(process: "Process", name: str) -> None:
    acme = await process.tenant()
    with pytest.raises(InvalidRequest):
        await process.upload(acme, "a", name)


@pytest.mark.parametrize("alias", ["3", "007", "sha256:abcdef01", "a@b", ""])
async def test_bad_aliases_are_refused(process: "Process", alias: str) -> None:
    acme = await process.tenant()
    with pytest.raises(InvalidRequest):
        await process.upload(acme, "a", promote=alias)


async def test_an_adapter_is_not_called_like_a_base(process: "Process") -> None:
    acme = await process.tenant()
    with pytest.raises(Conflict, match="name of a base"):
        await process.upload(acme, "a", "tiny")


async def test_another_tenants_adapter_is_not_found(process: "Process") -> None:
    acme, globex = await process.tenant(), await process.tenant("globex")
    await process.ready(acme, "a")
    for call in (
        process.registry.get(globex.id, "support"),
        process.registry.revision(globex.id, "support", 1),
        process.registry.retire(globex.id, "support", 1, author="key:2"),
        process.aliases.move(globex.id, "support", "prod", 1, author="key:2"),
    ):
        with pytest.raises(NotFound):
            await call


async def test_claims_are_exclusive_until_they_expire(process: "Process") -> None:
    acme = await process.tenant()
    for text in ("a", "b", "c"):
        await process.upload(acme, text)
    claims = await asyncio.gather(*(process.registry.claim_checks([BASE], 2) for _ in range(4)))
    claimed = [job.revision.number for jobs in claims for job in jobs]
    claimed += [job.revision.number for job in await process.registry.claim_checks([BASE], 9)]
    assert sorted(claimed) == [1, 2, 3]
    process.time.now += 16
    recovered = await process.registry.claim_checks([BASE], 9)
    assert [job.revision.number for job in recovered] == [1, 2, 3]
    assert recovered[0].source.path == str(process.blobs.path(recovered[0].revision.digest))
    assert await process.registry.claim_checks(["sha256:" + "0" * 64], 9) == ()


async def test_revisions_whose_files_are_gone_are_quarantined_at_the_start(
    process: "Process",
) -> None:
    acme = await process.tenant()
    revision = await process.ready(acme, "a")
    process.blobs.take_out(revision.digest)
    await process.keeper.start()
    await process.keeper.stop()
    assert (await process.registry.revision(acme.id, "support", 1)).state == "quarantined"


async def test_what_a_crash_left_is_swept_also_after_the_start(process: "Process") -> None:
    keeper = BlobKeeper(
        process.database, process.blobs, process.registry, grace=600.0, orphan_age=0.05
    )
    await keeper.start()
    with process.blobs.staging() as left:
        async with asyncio.timeout(10):
            while left.exists():
                await asyncio.sleep(0.01)
    await keeper.stop()


async def test_changes_are_audited(process: "Process") -> None:
    acme = await process.tenant()
    await process.ready(acme, "a", promote="prod")
    await process.registry.retire(acme.id, "support", 1, author="key:7")
    trail = await process.audit.entries(tenant_id=acme.id)
    assert [(entry.action, entry.target) for entry in trail] == [
        ("revision.retired", "support@1"),
        ("alias.move", "support@prod"),
        ("revision.ready", "support@1"),
        ("revision.upload", "support@1"),
        ("tenant.create", "acme"),
    ]
    assert (trail[0].author, trail[0].before, trail[0].after) == ("key:7", '"ready"', '"retired"')
    older = await process.audit.entries(before_id=trail[0].id, limit=1)
    assert older == trail[1:2]


@pytest.mark.parametrize("new_databases", ["postgresql"], indirect=True)
async def test_a_settlement_does_not_wait_for_an_upload_of_its_tenant(process: "Process") -> None:
    """Its audit row refers to the tenant that an upload holds, and the upload may be waiting for
    the adapter that the settlement holds. SQLite has one lock, so no order to get wrong."""
    acme = await process.tenant()
    revision, _ = await process.upload(acme, "a", promote="prod")
    async with process.database.write() as session:
        await TenantRepository(session).lock(acme.id)
        settled = await asyncio.wait_for(process.registry.settle(revision.id, PASSED), 20)
    assert settled.state == "ready"
