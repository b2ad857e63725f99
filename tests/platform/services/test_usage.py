"""Usage: no row lost, none written twice, sums by tenant, adapter, revision and time."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from polyloom.platform.db.engine import Database
from polyloom.platform.errors import DatabaseUnavailable, InvalidRequest
from polyloom.platform.services.usage import UsageFilter, UsageRecorder, UsageService
from polyloom.platform.services.views import TenantView, UsageRecord

if TYPE_CHECKING:
    from conftest import Process

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def record(
    request_id: str,
    tenant: TenantView,
    *,
    adapter: str | None = "support",
    revision: int | None = 1,
    at: datetime = NOON,
    model: str = "support",
) -> UsageRecord:
    return UsageRecord(
        request_id=request_id,
        tenant_id=tenant.id,
        key_id=None,
        endpoint="/v1/chat/completions",
        model=model,
        adapter=adapter,
        revision=revision,
        adapter_digest=None,
        fingerprint="fp_0",
        finish_reason="stop",
        prompt_tokens=10,
        completion_tokens=5,
        cached_tokens=2,
        accepted_draft_tokens=3,
        rejected_draft_tokens=1,
        queue_time=0.0,
        ttft=0.25,
        itl=None,
        duration=1.5,
        created_at=at,
    )


async def test_rows_are_written_in_the_background(process: "Process") -> None:
    acme = await process.tenant()
    recorder = UsageRecorder(process.database, flush_interval=0.01)
    usage = UsageService(process.database)
    await recorder.start()
    recorder.record(record("r1", acme))
    async with asyncio.timeout(10):
        while recorder.buffered:
            await asyncio.sleep(0.01)
    assert await usage.rows() == (record("r1", acme),)
    await recorder.stop()


async def test_stopping_writes_what_is_left(process: "Process") -> None:
    acme = await process.tenant()
    recorder = UsageRecorder(process.database, flush_interval=3_600, batch=7)
    await recorder.start()
    for i in range(50):
        recorder.record(record(f"r{i}", acme))
    await recorder.stop()
    assert len(await UsageService(process.database).rows()) == 50


async def test_a_row_whose_commit_was_in_doubt_is_not_written_twice(process: "Process") -> None:
    acme = await process.tenant()
    recorder = UsageRecorder(process.database)
    for _ in range(2):
        recorder.record(record("r1", acme))
        recorder.record(record("r2", acme))
        await recorder.flush()
    assert len(await UsageService(process.database).rows()) == 2
    assert recorder.dropped == 0


async def test_rows_wait_while_the_database_is_away(process: "Process", tmp_path: Path) -> None:
    acme = await process.tenant()
    lost = Database(f"sqlite:///{tmp_path}")
    recorder = UsageRecorder(lost, capacity=3)
    for i in range(5):
        recorder.record(record(f"r{i}", acme))
    with pytest.raises(DatabaseUnavailable):
        await recorder.flush()
    assert (recorder.buffered, recorder.dropped) == (3, 2)
    recorder._database = process.database
    await recorder.flush()
    rows = await UsageService(process.database).rows()
    assert {row.request_id for row in rows} == {"r2", "r3", "r4"}
    await lost.close()


async def test_one_row_that_is_refused_takes_no_other_with_it(process: "Process") -> None:
    acme = await process.tenant()
    recorder = UsageRecorder(process.database)
    nobody = TenantView(
        id=4711, slug="x", state="active", limits=acme.limits, created_at=acme.created_at
    )
    for row in (record("r1", acme), record("r2", nobody), record("r3", acme)):
        recorder.record(row)
    await recorder.flush()
    rows = await UsageService(process.database).rows()
    assert {row.request_id for row in rows} == {"r1", "r3"}
    assert recorder.dropped == 1


async def test_sums_by_tenant_adapter_revision_and_time(process: "Process") -> None:
    acme, globex = await process.tenant(), await process.tenant("globex")
    recorder = UsageRecorder(process.database)
    rows = [
        record("r1", acme),
        record("r2", acme, revision=2),
        record("r3", acme, adapter=None, revision=None, model="tiny"),
        record("r4", globex),
        record("r5", acme, at=NOON + timedelta(hours=1)),
    ]
    for row in rows:
        recorder.record(row)
    await recorder.flush()
    usage = UsageService(process.database)
    (everything,) = await usage.totals()
    assert (everything.requests, everything.prompt_tokens, everything.cached_tokens) == (5, 50, 10)
    assert (everything.accepted_draft_tokens, everything.rejected_draft_tokens) == (15, 5)
    assert (everything.mean_ttft, everything.mean_duration) == (0.25, 1.5)
    by_tenant = await usage.totals(group_by=["tenant"])
    assert [(total.tenant, total.requests) for total in by_tenant] == [("acme", 4), ("globex", 1)]
    mine = UsageFilter(tenant_id=acme.id)
    by_revision = await usage.totals(mine, group_by=["revision", "adapter"])
    assert {(t.adapter, t.revision, t.requests) for t in by_revision} == {
        ("support", 1, 2),
        ("support", 2, 1),
        (None, None, 1),
    }
    hour = UsageFilter(tenant_id=acme.id, since=NOON, until=NOON + timedelta(hours=1))
    assert [total.requests for total in await usage.totals(hour)] == [3]
    one = UsageFilter(tenant_id=acme.id, adapter="support", revision=2)
    assert [row.request_id for row in await usage.rows(one)] == ["r2"]
    assert [row.request_id for row in await usage.rows(limit=1)] == ["r5"]
    assert await usage.totals(UsageFilter(adapter="none")) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("revision", -1),
        ("revision", 2**31),
        ("adapter", "a\0"),
        ("since", datetime(2026, 1, 1)),
        ("until", datetime(2026, 1, 1)),
        ("until", datetime.fromisoformat("9999-12-31T23:59:59-12:00")),
    ],
)
async def test_a_filter_that_no_row_can_meet_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        UsageFilter(**{field: value})  # type: ignore[arg-type]
    assert refused.value.param == field


@pytest.mark.parametrize("limit", [-1, 2**63])
async def test_a_page_has_a_size(process: "Process", limit: int) -> None:
    for read in (UsageService(process.database).rows, process.audit.entries):
        with pytest.raises(InvalidRequest) as refused:
            await read(limit=limit)
        assert refused.value.param == "limit"
    with pytest.raises(InvalidRequest) as refused:
        await process.audit.entries(before_id=2**63)
    assert refused.value.param == "before_id"
