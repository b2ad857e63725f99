"""Recording one upload: its adapter, its number, its blob, in one transaction."""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.platform.db.draft_head_repositories import DraftHeadRepository
from polyloom.platform.db.engine import Database
from polyloom.platform.db.models import AdapterRow, BaseRow, BlobRow, RevisionRow, TenantRow
from polyloom.platform.db.repositories import (
    AdapterRepository,
    BlobRepository,
    RevisionRepository,
    RouteVersionRepository,
    TenantRepository,
)
from polyloom.platform.db.route_repositories import RouteRepository
from polyloom.platform.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded
from polyloom.platform.services.aliases import check_alias
from polyloom.platform.services.audit import note
from polyloom.platform.services.blobs import BlobStore
from polyloom.platform.services.rows import revision_view
from polyloom.platform.services.views import (
    BegunRevision,
    DraftHeadContent,
    RevisionContent,
    TenantView,
)
from polyloom.routing.names import is_name


@dataclass(frozen=True)
class Upload:
    """A validated upload as `AdapterRegistry.begin_revision` takes it."""

    tenant: TenantView
    adapter: str
    base_digest: str
    content: RevisionContent
    author: str
    promote: str | None


async def record_upload(
    database: Database, blobs: BlobStore, upload: Upload, now: datetime
) -> BegunRevision:
    """Record `upload`; the errors are `begin_revision`'s.

    The tenant's lock makes uploads of one tenant take turns, so numbers are distinct, limits hold
    and one content becomes one revision however many arrive at once.
    """
    _check_names(upload)
    await blobs.flush(Path(upload.content.folder))
    async with database.write() as session:
        tenant = await TenantRepository(session).lock(upload.tenant.id)
        base = await session.scalar(select(BaseRow).where(BaseRow.digest == upload.base_digest))
        if base is None:
            raise NotFound(f"no base has the digest {upload.base_digest}")
        adapter = await _adapter(session, tenant, upload, now)
        revisions = RevisionRepository(session)
        existing = await revisions.live_content(adapter.id, base.id, upload.content.digest)
        if existing is not None:
            if upload.promote is not None and existing.state == "checking":
                existing.promote_alias = upload.promote
            return BegunRevision(revision_view(existing, adapter, base), created=False)
        await check_storage(session, tenant, upload.content.bytes)
        adapter.route_version = await RouteVersionRepository(session).advance()
        await store_blob(session, blobs, upload.content)
        row = _revision(adapter, base, upload, await revisions.next_number(adapter.id), now)
        await revisions.add(row)
        note(
            session,
            author=upload.author,
            action="revision.upload",
            target=f"{adapter.name}@{row.number}",
            tenant_id=tenant.id,
            after=row.digest,
        )
        return BegunRevision(revision_view(row, adapter, base), created=True)


def _check_names(upload: Upload) -> None:
    if not is_name(upload.adapter):
        raise InvalidRequest(
            "an adapter's name has 1 to 128 letters, digits and ._:/-, and begins with a letter or"
            " digit",
            param="name",
        )
    if upload.promote is not None:
        check_alias(upload.promote)


async def _adapter(
    session: AsyncSession, tenant: TenantRow, upload: Upload, now: datetime
) -> AdapterRow:
    """The adapter, locked; created if it is new."""
    adapters = AdapterRepository(session)
    row = await adapters.lock(tenant.id, upload.adapter)
    if row is not None:
        return row
    if await session.scalar(select(BaseRow.id).where(BaseRow.name == upload.adapter)) is not None:
        raise Conflict(f"{upload.adapter!r} is the name of a base", param="name")
    route = await RouteRepository(session).named(tenant.id, upload.adapter)
    if route is not None and route.changes[0].targets:
        raise Conflict(f"{upload.adapter!r} is the name of a route", param="name")
    held = await session.scalar(
        select(func.count()).select_from(AdapterRow).where(AdapterRow.tenant_id == tenant.id)
    )
    if tenant.adapter_limit is not None and (held or 0) >= tenant.adapter_limit:
        raise QuotaExceeded(
            f"the tenant's limit of {tenant.adapter_limit} adapters is reached", param="adapters"
        )
    return await adapters.add(
        AdapterRow(tenant=tenant, name=upload.adapter, route_version=0, created_at=now),
    )


async def check_storage(session: AsyncSession, tenant: TenantRow, num_bytes: int) -> None:
    """Raises QuotaExceeded if `num_bytes` more are over the tenant's limit. The tenant is locked."""
    if tenant.storage_bytes is None:
        return
    stored = await RevisionRepository(session).stored_bytes(tenant.id)
    stored += await DraftHeadRepository(session).stored_bytes(tenant.id)
    if stored + num_bytes > tenant.storage_bytes:
        raise QuotaExceeded(
            f"the upload's {num_bytes} bytes would exceed the tenant's storage limit of"
            f" {tenant.storage_bytes} bytes",
            param="storage_bytes",
        )


async def store_blob(
    session: AsyncSession, blobs: BlobStore, content: RevisionContent | DraftHeadContent
) -> None:
    """Move the folder in, unless the same content is stored already. Under the version's lock."""
    known = await BlobRepository(session).by_digest(content.digest)
    if known is None:
        session.add(BlobRow(digest=content.digest, bytes=content.bytes))
        await session.flush()
    if known is None or not blobs.holds(content.digest):
        blobs.put(content.digest, Path(content.folder))


def _revision(
    adapter: AdapterRow, base: BaseRow, upload: Upload, number: int, now: datetime
) -> RevisionRow:
    content = upload.content
    return RevisionRow(
        adapter=adapter,
        base=base,
        number=number,
        digest=content.digest,
        state="checking",
        bytes=content.bytes,
        rank=content.rank,
        targets=list(content.targets),
        template_digest=content.template_digest,
        ships_tokenizer=content.ships_tokenizer,
        author=upload.author,
        promote_alias=upload.promote,
        created_at=now,
    )
