"""Share groups: tenants that call one tenant's revisions, or the base, in one prefix cache.

Both sides opt in: the owner shares a revision or the base and invites a tenant, and the tenant
accepts under a name of its own choice. Whatever the owner takes back is out of reach at once, and
the group's cache is emptied, so that nothing computed for one is found by who is left.
"""

import uuid
from collections.abc import Awaitable, Callable

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from polyloom.platform.clock import Clock, system_clock, utc
from polyloom.platform.db.engine import Database
from polyloom.platform.db.repositories import (
    AdapterRepository,
    RevisionRepository,
    RouteVersionRepository,
    TenantRepository,
)
from polyloom.platform.db.route_models import SharedRevisionRow, ShareGroupRow, ShareMemberRow
from polyloom.platform.db.route_repositories import ShareGroupRepository
from polyloom.platform.errors import Conflict, InvalidRequest, NotFound
from polyloom.platform.services.audit import note
from polyloom.platform.services.route_rows import group_view
from polyloom.platform.services.route_views import ShareGroupView
from polyloom.platform.services.snapshots import SnapshotService
from polyloom.platform.services.views import TenantView
from polyloom.routing.names import is_mount
from polyloom.routing.request import CacheOwner

LONGEST_SHARED_NAME = 64
"""A member's name for the group, a `/` and this must be a name that usage can be kept under."""

Revoke = Callable[[CacheOwner, str], Awaitable[None]]


class ShareService:
    """Creates and changes groups. Every change is audited under `author`, for the tenant that made
    it."""

    def __init__(
        self,
        database: Database,
        snapshots: SnapshotService,
        revoke: Revoke,
        *,
        clock: Clock = system_clock,
    ) -> None:
        """revoke: empties a group's prefix cache, for a change by the author given."""
        self._database = database
        self._snapshots = snapshots
        self._revoke = revoke
        self._clock = clock

    async def create(self, tenant: TenantView, name: str, *, author: str) -> ShareGroupView:
        """A group that `tenant` owns and is the first member of. Raises InvalidRequest (name),
        Conflict (the tenant calls another group so)."""
        _check_mount("name", name)
        async with self._database.write() as session:
            version = await RouteVersionRepository(session).advance()
            await _require_free(session, tenant, name)
            owner = await TenantRepository(session).lock(tenant.id)
            group = ShareGroupRow(
                uid=uuid.uuid4().hex,
                owner=owner,
                name=name,
                shares_base=False,
                route_version=version,
                created_at=utc(self._clock),
                members=[ShareMemberRow(tenant=owner, tenant_id=owner.id, mount=name)],
                revisions=[],
            )
            await ShareGroupRepository(session).add(group)
            view = _noted(session, group, tenant, "share.create", author, after=name)
        await self._snapshots.routes_changed()
        return view

    async def list(self, tenant: TenantView) -> tuple[ShareGroupView, ...]:
        """Groups that the tenant owns, is in, or is invited to (without a mount)."""
        async with self._database.read() as session:
            rows = await ShareGroupRepository(session).seen_by(tenant.id)
            return tuple(group_view(row, tenant.id) for row in rows)

    async def get(self, tenant: TenantView, name: str) -> ShareGroupView:
        """A group that the tenant owns. Raises NotFound."""
        async with self._database.read() as session:
            return group_view(await _owned(session, tenant, name), tenant.id)

    async def share(
        self, tenant: TenantView, name: str, adapter: str, number: int, *, author: str
    ) -> ShareGroupView:
        """Share revision `number` of the tenant's adapter, in place of another one of that adapter.

        Raises NotFound, Conflict (the revision is not ready), InvalidRequest (the adapter's name is
        too long to be called through a group).
        """
        async with self._database.write() as session:
            group = await _changed(session, tenant, name)
            owner = await AdapterRepository(session).named(tenant.id, adapter)
            revision = None
            if owner is not None:
                revision = await RevisionRepository(session).numbered(owner.id, number)
            if owner is None or revision is None:
                raise NotFound(f"no revision {number} of an adapter {adapter!r}")
            if revision.state != "ready":
                raise Conflict(
                    f"revision {number} is {revision.state}: a ready one can be shared",
                    param="revision",
                )
            if len(adapter) > LONGEST_SHARED_NAME:
                raise InvalidRequest(
                    f"an adapter whose name is longer than {LONGEST_SHARED_NAME} cannot be shared",
                    param="adapter",
                )
            known = next((s for s in group.revisions if s.adapter_id == owner.id), None)
            before = None if known is None else known.revision.number
            if known is None:
                known = SharedRevisionRow(adapter=owner, adapter_id=owner.id)
                group.revisions.append(known)
            known.revision, known.revision_id = revision, revision.id
            after = f"{adapter}@{number}"
            view = _noted(session, group, tenant, "share.put", author, before=before, after=after)
        await self._snapshots.routes_changed()
        return view

    async def unshare(
        self, tenant: TenantView, name: str, adapter: str, *, author: str
    ) -> ShareGroupView:
        """Take an adapter out of the group: 404 for its members at once. Raises NotFound."""
        async with self._database.write() as session:
            group = await _changed(session, tenant, name)
            shared = next((s for s in group.revisions if s.adapter.name == adapter), None)
            if shared is None:
                raise NotFound(f"the group {name!r} shares no adapter {adapter!r}")
            group.revisions.remove(shared)
            view = _noted(session, group, tenant, "share.revoke", author, before=adapter)
        await self._revoked(group.uid, author)
        return view

    async def share_base(
        self, tenant: TenantView, name: str, shares: bool, *, author: str
    ) -> ShareGroupView:
        """Let bases be called through the group, or no longer. Raises NotFound."""
        async with self._database.write() as session:
            group = await _changed(session, tenant, name)
            before, group.shares_base = group.shares_base, shares
            view = _noted(session, group, tenant, "share.base", author, before=before, after=shares)
        if before and not shares:
            await self._revoked(group.uid, author)
        else:
            await self._snapshots.routes_changed()
        return view

    async def invite(
        self, tenant: TenantView, name: str, member: str, *, author: str
    ) -> ShareGroupView:
        """Invite a tenant (a slug); it is in once it accepts. Twice is one invitation. Raises
        NotFound."""
        async with self._database.write() as session:
            group = await _changed(session, tenant, name)
            invited = await TenantRepository(session).by_slug(member)
            if invited is None:
                raise NotFound(f"no tenant {member!r}")
            if all(m.tenant_id != invited.id for m in group.members):
                group.members.append(ShareMemberRow(tenant=invited, tenant_id=invited.id))
            view = _noted(session, group, tenant, "share.invite", author, after=member)
        await self._snapshots.routes_changed()
        return view

    async def remove(
        self, tenant: TenantView, name: str, member: str, *, author: str
    ) -> ShareGroupView:
        """Put a tenant out of the group. Raises NotFound, Conflict (the owner itself)."""
        async with self._database.write() as session:
            group = await _changed(session, tenant, name)
            _remove(group, next((m for m in group.members if m.tenant.slug == member), None))
            view = _noted(session, group, tenant, "share.remove", author, before=member)
        await self._revoked(group.uid, author)
        return view

    async def accept(
        self, tenant: TenantView, group_id: str, mount: str, *, author: str
    ) -> ShareGroupView:
        """Join a group that the tenant is invited to, or call it otherwise from now on.

        mount: what comes before the `/` in `model`; the tenant's own names win over it.  Raises
        NotFound, InvalidRequest (mount), Conflict (the tenant calls another group so).
        """
        _check_mount("mount", mount)
        async with self._database.write() as session:
            version = await RouteVersionRepository(session).advance()
            group, member = await _membership(session, tenant, group_id)
            if member.mount != mount:
                await _require_free(session, tenant, mount)
            before, member.mount = member.mount, mount
            group.route_version = version
            view = _noted(
                session, group, tenant, "share.accept", author, before=before, after=mount
            )
        await self._snapshots.routes_changed()
        return view

    async def leave(self, tenant: TenantView, group_id: str, *, author: str) -> None:
        """Leave a group, or decline the invitation. Raises NotFound, Conflict (its owner)."""
        async with self._database.write() as session:
            version = await RouteVersionRepository(session).advance()
            group, member = await _membership(session, tenant, group_id)
            _remove(group, member)
            group.route_version = version
            _noted(session, group, tenant, "share.leave", author, before=member.mount)
        await self._revoked(group_id, author)

    async def delete(self, tenant: TenantView, name: str, *, author: str) -> None:
        """End the group for all its members. Raises NotFound."""
        async with self._database.write() as session:
            group = await _changed(session, tenant, name)
            view = group_view(group, tenant.id)
            group.members.clear()
            group.revisions.clear()
            group.deleted_at = utc(self._clock)
            _noted(session, group, tenant, "share.delete", author, before=view)
        await self._revoked(group.uid, author)

    async def _revoked(self, uid: str, author: str) -> None:
        """Out of the routes first, so that nothing fills the cache again."""
        await self._snapshots.routes_changed()
        await self._revoke(CacheOwner("group", uid), author)


def _check_mount(param: str, text: str) -> None:
    if not is_mount(text):
        raise InvalidRequest(
            "a group is called by 1 to 63 letters, digits and ._-, the first a letter or digit",
            param=param,
        )


async def _require_free(session: AsyncSession, tenant: TenantView, mount: str) -> None:
    taken = await session.scalar(
        select(ShareMemberRow.id).where(
            ShareMemberRow.tenant_id == tenant.id, ShareMemberRow.mount == mount
        )
    )
    if taken is not None:
        raise Conflict(f"this tenant calls another group {mount!r}", param="mount")


async def _changed(session: AsyncSession, tenant: TenantView, name: str) -> ShareGroupRow:
    """The tenant's own group, under the lock of the next version, which it is marked with."""
    version = await RouteVersionRepository(session).advance()
    group = await _owned(session, tenant, name)
    group.route_version = version
    return group


async def _owned(session: AsyncSession, tenant: TenantView, name: str) -> ShareGroupRow:
    group = await ShareGroupRepository(session).owned(tenant.id, name)
    if group is None:
        raise NotFound(f"no share group {name!r}")
    return group


async def _membership(
    session: AsyncSession, tenant: TenantView, uid: str
) -> tuple[ShareGroupRow, ShareMemberRow]:
    group = await ShareGroupRepository(session).by_uid(uid)
    members = [] if group is None else group.members
    member = next((m for m in members if m.tenant_id == tenant.id), None)
    if group is None or member is None:
        raise NotFound(f"no share group with the id {uid!r}")
    return group, member


def _remove(group: ShareGroupRow, member: ShareMemberRow | None) -> None:
    if member is None:
        raise NotFound("no such member")
    if member.tenant_id == group.owner_id:
        raise Conflict("the owner is always a member: delete the group instead", param="tenant")
    group.members.remove(member)


def _noted(
    session: AsyncSession,
    group: ShareGroupRow,
    tenant: TenantView,
    action: str,
    author: str,
    *,
    before: object = None,
    after: object = None,
) -> ShareGroupView:
    """Audit the change for the tenant that made it."""
    note(
        session,
        author=author,
        action=action,
        target=f"group:{group.uid}",
        tenant_id=tenant.id,
        before=before,
        after=after,
    )
    return group_view(group, tenant.id)
