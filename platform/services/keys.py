"""API keys: issued once, kept as hashes, revoked at once.

A key that was accepted is remembered for `CACHE_SECONDS`, so even a process that hears no
announcement honours a revocation within that time. Only while the database does not answer is it
believed for longer, up to `OUTAGE_SECONDS`: nobody can revoke it then either.
"""

import asyncio
import hashlib
import hmac
import logging
import math
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import get_args

from sqlalchemy import select, update

from polyloom.platform.clock import Clock, system_clock, utc
from polyloom.platform.coordination.announcements import Announcements, KeysChanged
from polyloom.platform.db.bounds import check_moment
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import ApiKeyRow
from polyloom.platform.db.repositories import ApiKeyRepository, TenantRepository
from polyloom.platform.errors import DatabaseUnavailable, InvalidApiKey, InvalidRequest, NotFound
from polyloom.platform.services.audit import note
from polyloom.platform.services.rows import key_view, tenant_view
from polyloom.platform.services.views import IssuedKey, KeyView, Principal, Scope

log = logging.getLogger(__name__)

CACHE_SECONDS = 1.0
REFRESH_SECONDS = 0.5
"""After which the use of a remembered key has it confirmed beside the request."""
OUTAGE_SECONDS = 60.0
PATIENCE_SECONDS = 1.0
"""For a database that must confirm what is believed; what is not believed waits `LOAD_SECONDS`."""
LOAD_SECONDS = 5.0
CACHE_SIZE = 10_000
LAST_USED_STEP = timedelta(minutes=1)
PREFIX_LENGTH = 12
OPERATOR = Principal(scopes=frozenset({"admin"}), tenant=None, key_id=None)


@dataclass(frozen=True)
class _Cached:
    """confirmed: when the record said so.  expires: the key's own end."""

    principal: Principal
    confirmed: float
    expires: float

    def fresh(self, now: float) -> bool:
        return now < min(self.confirmed + CACHE_SECONDS, self.expires)

    def ages(self, now: float) -> bool:
        return now >= self.confirmed + REFRESH_SECONDS

    def believed(self, now: float) -> bool:
        """While the database is away."""
        return now < min(self.confirmed + OUTAGE_SECONDS, self.expires)


class KeyService:
    """Issues, revokes and recognises keys."""

    def __init__(
        self,
        database: Database,
        announcements: Announcements,
        *,
        admin_key: str | None = None,
        clock: Clock = system_clock,
    ) -> None:
        """admin_key: the operator's, known to the server and stored nowhere."""
        self._database = database
        self._announcements = announcements
        self._admin_hash = None if admin_key is None else _hash(admin_key)
        self._clock = clock
        self._cache: dict[str, _Cached] = {}
        self._epoch = 0
        self._loading: dict[str, asyncio.Task[Principal]] = {}
        self._away_until = 0.0
        announcements.subscribe(KeysChanged, self._forget)

    async def issue(
        self,
        tenant: str,
        scopes: Collection[Scope],
        *,
        author: str,
        expires_at: datetime | None = None,
    ) -> IssuedKey:
        """A new key of `tenant` (a slug). Raises NotFound; InvalidRequest for no or unknown scopes
        and for an expiry in the past or without a time zone."""
        _check_scopes(scopes)
        check_moment("expires_at", expires_at)
        if expires_at is not None and expires_at <= utc(self._clock):
            raise InvalidRequest("the expiry is in the past", param="expires_at")
        key = "pl_" + secrets.token_urlsafe(32)
        async with self._database.write() as session:
            owner = await TenantRepository(session).by_slug(tenant)
            if owner is None:
                raise NotFound(f"no tenant {tenant!r}")
            row = ApiKeyRow(
                tenant_id=owner.id,
                key_hash=_hash(key),
                prefix=key[:PREFIX_LENGTH],
                scopes=sorted(set(scopes)),
                expires_at=expires_at,
            )
            await ApiKeyRepository(session).add(row)
            view = key_view(row)
            note(
                session,
                author=author,
                action="key.issue",
                target=f"key:{row.id}",
                tenant_id=owner.id,
                after=view,
            )
        return IssuedKey(key=key, view=view)

    async def list(self, tenant: str) -> tuple[KeyView, ...]:
        """All keys of `tenant` (a slug), oldest first, revoked ones included. Raises NotFound."""
        async with self._database.read() as session:
            owner = await TenantRepository(session).by_slug(tenant)
            if owner is None:
                raise NotFound(f"no tenant {tenant!r}")
            rows = await session.scalars(
                select(ApiKeyRow).where(ApiKeyRow.tenant_id == owner.id).order_by(ApiKeyRow.id)
            )
            return tuple(key_view(row) for row in rows)

    async def revoke(self, tenant: str, key_id: int, *, author: str) -> KeyView:
        """In force within a second in every process. Revoking twice is one revocation. Raises
        NotFound."""
        async with self._database.write() as session:
            row = await ApiKeyRepository(session).of_tenant(tenant, key_id)
            if row is None:
                raise NotFound(f"the tenant {tenant!r} has no key {key_id}")
            if row.revoked_at is None:
                row.revoked_at = utc(self._clock)
                note(
                    session,
                    author=author,
                    action="key.revoke",
                    target=f"key:{row.id}",
                    tenant_id=row.tenant_id,
                )
            view = key_view(row)
        await self._announcements.publish(KeysChanged())
        return view

    async def authenticate(self, key: str) -> Principal:
        """Who holds `key`. Raises InvalidApiKey, DatabaseUnavailable."""
        key_hash = _hash(key)
        if self._admin_hash is not None and hmac.compare_digest(key_hash, self._admin_hash):
            return OPERATOR
        cached = self._cache.get(key_hash)
        now = self._clock()
        if cached is not None and cached.fresh(now):
            if cached.ages(now):
                self._ask_record(key_hash)
            return cached.principal
        try:
            return await self._confirmed(key_hash, None if cached is None else cached.principal)
        except DatabaseUnavailable:
            cached = self._cache.get(key_hash)
            if cached is None or not cached.believed(self._clock()):
                raise
            self._away_until = self._clock() + CACHE_SECONDS
            return cached.principal

    async def _confirmed(self, key_hash: str, believed: Principal | None) -> Principal:
        """What the record says; asked once for all who wait. Raises DatabaseUnavailable also for an
        answer that takes too long: it is remembered when it comes."""
        task = self._ask_record(key_hash)
        patience = LOAD_SECONDS if believed is None else PATIENCE_SECONDS
        if believed is not None and self._clock() < self._away_until:
            patience = 0.0
        done, _ = await asyncio.wait((task,), timeout=patience)
        if not done:
            raise DatabaseUnavailable("the database does not answer")
        return task.result()

    def _ask_record(self, key_hash: str) -> asyncio.Task[Principal]:
        """The one question about this key that is on its way."""
        task = self._loading.get(key_hash)
        if task is None:
            task = self._loading[key_hash] = asyncio.create_task(self._load(key_hash))
            task.add_done_callback(lambda done: self._loaded(key_hash, done))
        return task

    def _loaded(self, key_hash: str, task: asyncio.Task[Principal]) -> None:
        if self._loading.get(key_hash) is task:
            del self._loading[key_hash]
        if not task.cancelled():
            task.exception()  # who waits sees it; who gave up does not

    async def _load(self, key_hash: str) -> Principal:
        epoch, now = self._epoch, utc(self._clock)
        async with self._database.read() as session:
            row = await ApiKeyRepository(session).by_hash(key_hash)
        if row is None or not _usable(row, now):
            self._cache.pop(key_hash, None)
            raise InvalidApiKey("the API key is unknown, expired or revoked")
        principal = Principal(
            scopes=frozenset(key_view(row).scopes),
            tenant=tenant_view(row.tenant),
            key_id=row.id,
        )
        expires = math.inf if row.expires_at is None else row.expires_at.timestamp()
        if epoch == self._epoch:
            self._remember(key_hash, _Cached(principal, now.timestamp(), expires))
        if row.last_used_at is None or now - row.last_used_at >= LAST_USED_STEP:
            await self._mark_used(row.id, now)
        return principal

    def _remember(self, key_hash: str, cached: _Cached) -> None:
        if len(self._cache) >= CACHE_SIZE:
            self._cache.clear()
        self._cache[key_hash] = cached

    async def _mark_used(self, key_id: int, now: datetime) -> None:
        statement = update(ApiKeyRow).where(ApiKeyRow.id == key_id).values(last_used_at=now)
        try:
            async with self._database.write() as session:
                await session.execute(statement)
        except DatabaseUnavailable:
            log.warning("could not note the use of key %d", key_id)

    async def _forget(self, _announcement: KeysChanged) -> None:
        """A load that began before the change is neither waited for nor remembered after it."""
        self._epoch += 1
        self._loading.clear()
        self._cache.clear()


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()


def _usable(row: ApiKeyRow, now: datetime) -> bool:
    expired = row.expires_at is not None and row.expires_at <= now
    return row.revoked_at is None and not expired and row.tenant.state == "active"


def _check_scopes(scopes: Collection[Scope]) -> None:
    if not scopes:
        raise InvalidRequest("a key needs at least one scope", param="scopes")
    for scope in scopes:
        if scope not in get_args(Scope):
            raise InvalidRequest(f"unknown scope {scope!r}", param="scopes")
