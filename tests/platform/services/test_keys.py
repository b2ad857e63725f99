"""Keys: shown once, kept as hashes, revoked everywhere at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import msgspec
import pytest
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.platform.clock import utc
from polyloom.platform.coordination.announcements import Announcements, KeysChanged
from polyloom.platform.coordination.live_state import LiveState
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import ApiKeyRow
from polyloom.platform.errors import (
    Conflict,
    DatabaseUnavailable,
    InvalidApiKey,
    InvalidRequest,
    NotFound,
)
from polyloom.platform.services import keys
from polyloom.platform.services.keys import OUTAGE_SECONDS, KeyService
from polyloom.platform.services.views import TenantLimits

if TYPE_CHECKING:
    from conftest import Process


async def issue(process: "Process", tenant: str = "acme") -> str:
    issued = await process.keys.issue(tenant, ["inference"], author="operator")
    return issued.key


async def test_a_key_opens_its_tenant_with_its_scopes(process: "Process") -> None:
    acme = await process.tenant(requests_per_minute=5)
    issued = await process.keys.issue("acme", ["inference", "adapters:read"], author="operator")
    principal = await process.keys.authenticate(issued.key)
    assert principal.tenant == acme
    assert principal.scopes == {"inference", "adapters:read"}
    assert (principal.key_id, principal.author) == (issued.view.id, f"key:{issued.view.id}")


async def test_the_secret_is_stored_nowhere(process: "Process") -> None:
    await process.tenant()
    key = await issue(process)
    async with process.database.read() as session:
        row = (await session.scalars(select(ApiKeyRow))).one()
    assert key.startswith(row.prefix) and len(row.prefix) == 12
    stored = [str(value) for value in vars(row).values()]
    stored += [str(entry) for entry in await process.audit.entries()]
    assert not any(key in text for text in stored)


async def test_the_operator_has_no_tenant(process: "Process") -> None:
    principal = await process.keys.authenticate("the operator's")
    assert (principal.tenant, principal.key_id, principal.author) == (None, None, "operator")
    assert principal.scopes == {"admin"}


@pytest.mark.parametrize("key", ["", "pl_unknown", "the operator", "é", "\udcff", "\x00"])
async def test_unknown_keys_are_refused(process: "Process", key: str) -> None:
    with pytest.raises(InvalidApiKey):
        await process.keys.authenticate(key)


async def test_a_revoked_key_is_refused_at_once(process: "Process") -> None:
    await process.tenant()
    key = await issue(process)
    principal = await process.keys.authenticate(key)
    assert principal.key_id is not None
    await process.keys.revoke("acme", principal.key_id, author="operator")
    with pytest.raises(InvalidApiKey):
        await process.keys.authenticate(key)
    again = await process.keys.revoke("acme", principal.key_id, author="operator")
    assert again.revoked_at == utc(process.time)


async def test_an_expired_key_is_refused(process: "Process") -> None:
    await process.tenant()
    end = utc(process.time) + timedelta(seconds=0.5)
    issued = await process.keys.issue("acme", ["inference"], author="operator", expires_at=end)
    await process.keys.authenticate(issued.key)
    process.time.now += 0.6
    with pytest.raises(InvalidApiKey):
        await process.keys.authenticate(issued.key)
    with pytest.raises(InvalidRequest, match="past"):
        await process.keys.issue("acme", ["inference"], author="operator", expires_at=end)


async def test_a_disabled_tenant_is_locked_out_and_let_in_again(process: "Process") -> None:
    await process.tenant()
    key = await issue(process)
    await process.keys.authenticate(key)
    await process.tenants.set_state("acme", "disabled", author="operator")
    with pytest.raises(InvalidApiKey):
        await process.keys.authenticate(key)
    await process.tenants.set_state("acme", "active", author="operator")
    await process.keys.authenticate(key)


async def test_changed_limits_reach_the_next_request(process: "Process") -> None:
    await process.tenant()
    key = await issue(process)
    await process.keys.authenticate(key)
    limits = TenantLimits(requests_per_minute=7)
    await process.tenants.set_limits("acme", limits, author="operator")
    principal = await process.keys.authenticate(key)
    assert principal.tenant is not None and principal.tenant.limits == limits


async def test_use_is_noted_once_a_minute(process: "Process") -> None:
    await process.tenant()
    key = await issue(process)
    first = utc(process.time)
    for seconds, expected in ((0, first), (30, first), (31, first + timedelta(seconds=61))):
        process.time.now += seconds
        await process.keys.authenticate(key)
        (view,) = await process.keys.list("acme")
        assert view.last_used_at == expected


async def test_another_tenants_key_cannot_be_revoked(process: "Process") -> None:
    await process.tenant()
    await process.tenant("globex")
    principal = await process.keys.authenticate(await issue(process))
    assert principal.key_id is not None
    with pytest.raises(NotFound):
        await process.keys.revoke("globex", principal.key_id, author="operator")


@pytest.mark.parametrize("scopes", [[], ["root"], ["inference", ""]])
async def test_scopes_are_checked(process: "Process", scopes: list[str]) -> None:
    await process.tenant()
    with pytest.raises(InvalidRequest):
        await process.keys.issue("acme", scopes, author="operator")  # type: ignore[arg-type]


@pytest.mark.parametrize("slug", ["", "-a", "A", "a_b", "x" * 64, "a\n", "a b"])
async def test_slugs_are_checked(process: "Process", slug: str) -> None:
    with pytest.raises(InvalidRequest):
        await process.tenants.create(slug, author="operator")


async def test_tenants_are_unique_and_listed(process: "Process") -> None:
    await process.tenant("b")
    await process.tenant("a")
    with pytest.raises(Conflict):
        await process.tenant("a")
    assert [tenant.slug for tenant in await process.tenants.list()] == ["a", "b"]
    with pytest.raises(NotFound):
        await process.tenants.get("c")
    for wrong in (-1, 2**31):
        with pytest.raises(InvalidRequest, match="requests_per_minute"):
            await process.tenant("c", requests_per_minute=wrong)


class Elsewhere:
    """Another process that recognises keys, with or without Redis in common."""

    def __init__(self, process: "Process", live: LiveState) -> None:
        self.announcements = Announcements(live, "elsewhere")
        self.keys = KeyService(process.database, self.announcements, clock=process.time)


@pytest.fixture
async def lives(redis_url: str) -> AsyncIterator[list[LiveState]]:
    made = [LiveState(redis_url), LiveState(redis_url)]
    yield made
    for live in made:
        await live.close()


async def test_a_revocation_reaches_other_processes_through_redis(
    process: "Process", lives: list[LiveState], database: Database
) -> None:
    here = KeyService(database, Announcements(lives[0], "here"), clock=process.time)
    there = Elsewhere(process, lives[1])
    await there.announcements.start()
    await process.tenant()
    key = await issue(process)
    principal = await there.keys.authenticate(key)
    assert principal.key_id is not None
    await here.revoke("acme", principal.key_id, author="operator")
    # The clock stands still, so only the announcement can void what is remembered there.
    async with asyncio.timeout(10):
        with pytest.raises(InvalidApiKey):
            while True:
                await there.keys.authenticate(key)
                await asyncio.sleep(0.01)
    await there.announcements.stop()


async def test_without_redis_a_revocation_takes_a_second_at_most(process: "Process") -> None:
    there = Elsewhere(process, LiveState())
    await process.tenant()
    key = await issue(process)
    principal = await there.keys.authenticate(key)
    assert principal.key_id is not None
    await process.keys.revoke("acme", principal.key_id, author="operator")
    process.time.now += 1.0
    with pytest.raises(InvalidApiKey):
        await there.keys.authenticate(key)


async def test_a_key_in_use_is_confirmed_beside_its_requests(
    process: "Process", monkeypatch: pytest.MonkeyPatch
) -> None:
    await process.tenant()
    key = await issue(process)
    await process.keys.authenticate(key)
    asked, answered, read = 0, asyncio.Event(), process.database.read

    @asynccontextmanager
    async def counted() -> AsyncIterator[AsyncSession]:
        nonlocal asked
        asked += 1
        async with read() as session:
            yield session
        answered.set()

    monkeypatch.setattr(process.database, "read", counted)
    process.time.now += keys.REFRESH_SECONDS
    await process.keys.authenticate(key)
    assert asked == 0  # the request did not wait
    await answered.wait()
    process.time.now += 0.75 * keys.CACHE_SECONDS  # too long since the first time
    await process.keys.authenticate(key)
    assert asked == 1


@pytest.mark.parametrize("end", ["2030-01-01T00:00:00", "9999-12-31T23:59:59-12:00"])
async def test_an_expiry_is_one_moment(process: "Process", end: str) -> None:
    """Without a time zone it is another to each reader; beyond year 9999 none can be stored."""
    await process.tenant()
    moment = datetime.fromisoformat(end)
    with pytest.raises(InvalidRequest) as refused:
        await process.keys.issue("acme", ["inference"], author="operator", expires_at=moment)
    assert refused.value.param == "expires_at"


@pytest.mark.parametrize("key_id", [0, -1, 2**63, 10**30])
async def test_a_key_that_no_column_can_hold_is_unknown(process: "Process", key_id: int) -> None:
    await process.tenant()
    with pytest.raises(NotFound):
        await process.keys.revoke("acme", key_id, author="operator")


async def test_a_misspelt_limit_is_no_unlimited_tenant() -> None:
    with pytest.raises(msgspec.ValidationError, match="request_per_minute"):
        msgspec.json.decode(b'{"request_per_minute": 5}', type=TenantLimits)


@pytest.mark.parametrize("slug", ["a\0", "A", ""])
async def test_a_slug_that_no_tenant_can_have_is_unknown(process: "Process", slug: str) -> None:
    with pytest.raises(NotFound):
        await process.tenants.get(slug)


async def test_a_tenants_weight_is_bounded_changed_and_audited(process: "Process") -> None:
    acme = await process.tenants.create("acme", author="operator", weight=2.5)
    assert (acme.weight, (await process.tenants.get("acme")).weight) == (2.5, 2.5)
    changed = await process.tenants.set_weight("acme", 0.5, author="operator")
    assert changed.weight == 0.5
    entry = (await process.audit.entries(tenant_id=acme.id))[0]
    assert (entry.action, entry.before, entry.after) == ("tenant.weight", "2.5", "0.5")
    for weight in (0.0, -1.0, 101.0, float("nan")):
        with pytest.raises(InvalidRequest, match="weight|between"):
            await process.tenants.set_weight("acme", weight, author="operator")


async def test_a_known_key_is_believed_while_the_database_is_away(
    process: "Process", monkeypatch: pytest.MonkeyPatch
) -> None:
    await process.tenant()
    key = await issue(process)
    known = await process.keys.authenticate(key)
    unknown = await issue(process)

    @asynccontextmanager
    async def away() -> AsyncIterator[None]:
        raise DatabaseUnavailable("gone")
        yield

    monkeypatch.setattr(process.database, "read", away)
    process.time.now += 2
    assert await process.keys.authenticate(key) == known
    with pytest.raises(DatabaseUnavailable):
        await process.keys.authenticate(unknown)
    process.time.now += OUTAGE_SECONDS
    with pytest.raises(DatabaseUnavailable):
        await process.keys.authenticate(key)


async def test_a_hanging_database_delays_a_known_key_once_and_is_asked_once(
    process: "Process", monkeypatch: pytest.MonkeyPatch
) -> None:
    await process.tenant()
    key = await issue(process)
    await process.keys.authenticate(key)
    back, asked, read = asyncio.Event(), 0, process.database.read

    @asynccontextmanager
    async def hanging() -> AsyncIterator[AsyncSession]:
        nonlocal asked
        asked += 1
        await back.wait()
        async with read() as session:
            yield session

    monkeypatch.setattr(process.database, "read", hanging)
    monkeypatch.setattr(keys, "PATIENCE_SECONDS", 0.05)
    process.time.now += 2
    await asyncio.gather(*(process.keys.authenticate(key) for _ in range(20)))
    assert asked == 1
    monkeypatch.undo()
    back.set()
    await process.keys.revoke("acme", 1, author="operator")
    process.time.now += 2
    with pytest.raises(InvalidApiKey):
        await process.keys.authenticate(key)


async def test_a_revocation_that_is_heard_of_ends_belief_at_once(
    process: "Process", monkeypatch: pytest.MonkeyPatch
) -> None:
    await process.tenant()
    key = await issue(process)
    await process.keys.authenticate(key)
    await process.announcements.publish(KeysChanged())

    @asynccontextmanager
    async def away() -> AsyncIterator[None]:
        raise DatabaseUnavailable("gone")
        yield

    monkeypatch.setattr(process.database, "read", away)
    with pytest.raises(DatabaseUnavailable):
        await process.keys.authenticate(key)
