"""The registry of adapters and revisions: what was uploaded, its state, its way to an end.

Content that is a live revision of the adapter already is that revision. Content whose revision has
failed, was retired or quarantined becomes a new one, checked anew, when it is uploaded again.
"""

from collections.abc import Awaitable, Callable, Collection
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.adapters.source import AdapterSource
from polyloom.platform.clock import Clock, system_clock, utc
from polyloom.platform.db.draft_head_repositories import DraftHeadRepository
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import AdapterRow, RevisionRow
from polyloom.platform.db.repositories import (
    AdapterRepository,
    AliasRepository,
    BlobRepository,
    RevisionRepository,
    RouteVersionRepository,
)
from polyloom.platform.errors import NotFound
from polyloom.platform.services.aliases import Requirement, record_move
from polyloom.platform.services.audit import note
from polyloom.platform.services.blobs import BlobStore
from polyloom.platform.services.lifecycle import move_to
from polyloom.platform.services.rows import adapter_view, revision_view
from polyloom.platform.services.uploads import Upload, record_upload
from polyloom.platform.services.views import (
    AdapterView,
    BegunRevision,
    CheckJob,
    FidelityVerdict,
    PromotionVerdict,
    RevisionContent,
    RevisionView,
    TenantView,
)

CLAIM_SECONDS = 15.0


class AdapterRegistry:
    """Every change of a revision's state goes through here, one adapter at a time."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        routes_changed: Callable[[], Awaitable[None]],
        *,
        clock: Clock = system_clock,
    ) -> None:
        """routes_changed: called after each committed change."""
        self._database = database
        self._blobs = blobs
        self._routes_changed = routes_changed
        self._clock = clock

    async def begin_revision(
        self,
        tenant: TenantView,
        adapter: str,
        base_digest: str,
        content: RevisionContent,
        *,
        author: str,
        promote: str | None = None,
    ) -> BegunRevision:
        """Record validated content as the adapter's next revision, in state `checking`.

        The adapter is created by its first revision. promote: alias to move once the revision is
        ready; content that is a ready one already moves nothing.
        Raises InvalidRequest (names), Conflict (the adapter is called like a base), NotFound (base),
        QuotaExceeded (adapters, storage).
        """
        upload = Upload(
            tenant=tenant,
            adapter=adapter,
            base_digest=base_digest,
            content=content,
            author=author,
            promote=promote,
        )
        begun = await record_upload(self._database, self._blobs, upload, utc(self._clock))
        await self._routes_changed()
        return begun

    async def list(self, tenant_id: int) -> tuple[AdapterView, ...]:
        """The tenant's adapters by name."""
        async with self._database.read() as session:
            rows = await AdapterRepository(session).of_tenant(tenant_id)
            return tuple(adapter_view(row) for row in rows)

    async def get(self, tenant_id: int, adapter: str) -> AdapterView:
        """Raises NotFound."""
        async with self._database.read() as session:
            row = await AdapterRepository(session).named(tenant_id, adapter)
            if row is None:
                raise NotFound(f"no adapter {adapter!r}")
            return adapter_view(row)

    async def revision(self, tenant_id: int, adapter: str, number: int) -> RevisionView:
        """Raises NotFound."""
        async with self._database.read() as session:
            row = await AdapterRepository(session).named(tenant_id, adapter)
            found = None
            if row is not None:
                found = await RevisionRepository(session).numbered(row.id, number)
            return _view(_existing(found, adapter, number))

    async def revision_by_id(self, revision_id: int) -> RevisionView:
        """Raises NotFound."""
        async with self._database.read() as session:
            row = await RevisionRepository(session).viewed(id=revision_id)
            if row is None:
                raise NotFound(f"no revision with id {revision_id}")
            return _view(row)

    async def retire(
        self,
        tenant_id: int,
        adapter: str,
        number: int,
        *,
        author: str,
        require: Requirement | None = None,
    ) -> RevisionView:
        """Take a revision out of service for good; running requests finish, the row stays. Retiring
        twice is one retirement.

        require: may refuse it, within the transaction and under the lock of the route version.
        Raises NotFound, and what `require` raises.

        Another tenant's revision may have the same content: the engine unloads the digest only when
        `is_live` says no.
        """
        async with self._database.write() as session:
            owner = await AdapterRepository(session).lock(tenant_id, adapter)
            found = None
            if owner is not None:
                found = await RevisionRepository(session).numbered(owner.id, number)
            row = _existing(found, adapter, number)
            if row.state != "retired":
                if require is not None:
                    await RouteVersionRepository(session).advance()
                    await require(session)
                before = row.state
                move_to(row, "retired", utc(self._clock))
                await _record_state(session, row, before, author)
            view = _view(row)
        await self._routes_changed()
        return view

    async def is_live(self, digest: str) -> bool:
        """Whether any tenant's revision of this content is checking or ready."""
        async with self._database.read() as session:
            return bool(await RevisionRepository(session).live(digest))

    async def quarantine(self, digest: str, reason: str) -> tuple[RevisionView, ...]:
        """Take every live revision of this content out of service: its stored bytes are not what
        they were. The folder goes at once, so that a new upload brings good bytes."""
        async with self._database.write() as session:
            await AdapterRepository(session).lock_holders(digest)
            rows = await RevisionRepository(session).live(digest)
            for row in rows:
                before = row.state
                move_to(row, "quarantined", utc(self._clock))
                row.failure = reason
                await _record_state(session, row, before, "server")
            if rows:
                await self._drop_blob(session, digest)
            views = tuple(_view(row) for row in rows)
        await self._blobs.empty_trash()
        if views:
            await self._routes_changed()
        return views

    async def claim_checks(
        self, base_digests: Collection[str], limit: int = 1
    ) -> tuple[CheckJob, ...]:
        """Claim revisions in `checking` on these bases that no process holds: new ones, and those a
        process left by dying. A claim lasts `CLAIM_SECONDS` unless renewed."""
        now = utc(self._clock)
        async with self._database.write() as session:
            rows = await RevisionRepository(session).unclaimed(now, base_digests, limit)
            for row in rows:
                row.claimed_until = now + timedelta(seconds=CLAIM_SECONDS)
            return tuple(
                CheckJob(
                    _view(row),
                    AdapterSource(row.digest, str(self._blobs.path(row.digest))),
                    row.promote_alias,
                )
                for row in rows
            )

    async def renew_claim(self, revision_id: int, seconds: float = CLAIM_SECONDS) -> None:
        """Hold a claimed revision for `seconds` more; 0 gives it back."""
        until = utc(self._clock) + timedelta(seconds=seconds)
        async with self._database.write() as session:
            row = await RevisionRepository(session).viewed(id=revision_id)
            if row is not None and row.state == "checking":
                row.claimed_until = until

    async def settle(
        self,
        revision_id: int,
        verdict: FidelityVerdict,
        promotion: PromotionVerdict | None = None,
    ) -> RevisionView:
        """End the check: `ready`, and the alias asked for moves, or `failed`.

        promotion: whether that alias may move; None: it has no gate.  Raises NotFound; Conflict if
        the revision is not `checking` any more.
        """
        now = utc(self._clock)
        async with self._database.write() as session:
            owner = await AdapterRepository(session).lock_of(revision_id)
            row = await RevisionRepository(session).viewed(id=revision_id)
            if owner is None or row is None:
                raise NotFound(f"no revision with id {revision_id}")
            before = row.state
            move_to(row, "ready" if verdict.passed else "failed", now)
            row.max_logprob_diff, row.failure = verdict.max_logprob_diff, verdict.failure
            await _record_state(session, row, before, "server")
            if verdict.passed and row.promote_alias is not None:
                await self._promote(session, owner, row, row.promote_alias, promotion)
            view = _view(row)
        await self._routes_changed()
        return view

    async def _promote(
        self,
        session: AsyncSession,
        owner: AdapterRow,
        row: RevisionRow,
        alias: str,
        promotion: PromotionVerdict | None,
    ) -> None:
        """Checks may end in another order than their uploads came: an alias that points at a newer
        revision by now stays there. So does one whose gate was not passed."""
        row.not_promoted = None if promotion is None else _refusal(promotion, alias)
        if row.not_promoted is not None:
            note(
                session,
                author=row.author,
                action="alias.refused",
                target=f"{owner.name}@{alias}",
                tenant_id=owner.tenant_id,
                after=row.not_promoted,
            )
            return
        present = await AliasRepository(session).named(owner.id, alias)
        if present is not None and present.changes[0].revision.number > row.number:
            return
        await record_move(
            session,
            owner,
            alias,
            row,
            author=row.author,
            reason="promoted when ready",
            now=utc(self._clock),
        )

    async def _drop_blob(self, session: AsyncSession, digest: str) -> None:
        blob = await BlobRepository(session).by_digest(digest)
        if blob is not None:
            await session.delete(blob)
            await session.flush()
        self._blobs.take_out(digest)


async def _record_state(session: AsyncSession, row: RevisionRow, before: str, author: str) -> None:
    """Audit the change and make snapshots load the adapter again. A revision's end is its draft
    heads'."""
    note(
        session,
        author=author,
        action=f"revision.{row.state}",
        target=f"{row.adapter.name}@{row.number}",
        tenant_id=row.adapter.tenant_id,
        before=before,
        after=row.state,
    )
    row.adapter.route_version = await RouteVersionRepository(session).advance()
    if row.ended_at is not None:
        await DraftHeadRepository(session).retire_of_revision(row.id, row.ended_at)


def _refusal(promotion: PromotionVerdict, alias: str) -> str | None:
    if promotion.alias != alias:
        return f"{alias!r} was asked for when the check was ending: move it now"
    return promotion.refusal


def _existing(row: RevisionRow | None, adapter: str, number: int) -> RevisionRow:
    if row is None:
        raise NotFound(f"no revision {number} of an adapter {adapter!r}")
    return row


def _view(row: RevisionRow) -> RevisionView:
    return revision_view(row, row.adapter, row.base)
