"""Share groups: both sides opt in, names are each tenant's own, and what is taken back is gone."""

from typing import TYPE_CHECKING

import pytest

from polyloom.platform.errors import Conflict, InvalidRequest, NotFound
from polyloom.platform.services.views import TenantView
from polyloom.routing.errors import ModelNotFound
from polyloom.routing.request import CacheOwner
from polyloom.routing.resolver import Resolution, resolve

if TYPE_CHECKING:
    from conftest import Process


def found(process: "Process", tenant: str, model: str) -> Resolution:
    return resolve(process.snapshots.current, tenant, model)


def unknown(process: "Process", tenant: str, model: str) -> bool:
    try:
        found(process, tenant, model)
    except ModelNotFound:
        return True
    return False


async def shared(process: "Process") -> tuple[TenantView, TenantView, CacheOwner]:
    """acme shares support@1 and the base with globex, which calls the group `friends`."""
    acme, globex = await process.tenant(), await process.tenant("globex")
    for text in ("a", "b"):
        await process.ready(acme, text)
    group = await process.shares.create(acme, "team", author="key:1")
    await process.shares.share(acme, "team", "support", 1, author="key:1")
    await process.shares.share_base(acme, "team", True, author="key:1")
    await process.shares.invite(acme, "team", "globex", author="key:1")
    await process.shares.accept(globex, group.id, "friends", author="key:2")
    return acme, globex, CacheOwner("group", group.id)


async def test_nothing_is_shared_before_both_sides_agree(process: "Process") -> None:
    acme, globex = await process.tenant(), await process.tenant("globex")
    await process.ready(acme, "a")
    group = await process.shares.create(acme, "team", author="key:1")
    await process.shares.share(acme, "team", "support", 1, author="key:1")
    with pytest.raises(NotFound):
        await process.shares.accept(globex, group.id, "team", author="key:2")
    await process.shares.invite(acme, "team", "globex", author="key:1")
    await process.shares.invite(acme, "team", "globex", author="key:1")
    assert unknown(process, "globex", "team/support")
    (invitation,) = await process.shares.list(globex)
    assert (invitation.owner, invitation.mount, len(invitation.members)) == ("acme", None, 1)
    await process.shares.accept(globex, invitation.id, "team", author="key:2")
    assert found(process, "globex", "team/support").label == "team/support@1"


async def test_a_group_has_one_cache_and_each_member_its_own_name_for_it(
    process: "Process",
) -> None:
    _, globex, owner = await shared(process)
    for tenant, model in (("globex", "friends/support"), ("acme", "team/support")):
        assert found(process, tenant, model).owner == owner
    assert found(process, "globex", "friends/tiny").owner == owner
    assert found(process, "globex", "tiny").owner == CacheOwner("tenant", "globex")
    assert unknown(process, "globex", "team/support")
    await process.shares.accept(globex, owner.name, "partners", author="key:2")
    assert unknown(process, "globex", "friends/support")
    assert found(process, "globex", "partners/support").owner == owner


async def test_another_revision_takes_the_place_of_the_shared_one(process: "Process") -> None:
    acme, _, _ = await shared(process)
    await process.shares.share(acme, "team", "support", 2, author="key:1")
    assert found(process, "globex", "friends/support").revision == 2
    assert unknown(process, "globex", "friends/support@1")


@pytest.mark.parametrize("how", ["unshare", "remove", "leave", "delete"])
async def test_what_is_taken_back_is_unknown_at_once_and_its_cache_is_emptied(
    process: "Process", how: str
) -> None:
    acme, globex, owner = await shared(process)
    if how == "unshare":
        await process.shares.unshare(acme, "team", "support", author="key:1")
    elif how == "remove":
        await process.shares.remove(acme, "team", "globex", author="key:1")
    elif how == "leave":
        await process.shares.leave(globex, owner.name, author="key:2")
    else:
        await process.shares.delete(acme, "team", author="key:1")
    assert unknown(process, "globex", "friends/support")
    assert unknown(process, "globex", "friends/tiny") == (how != "unshare")
    assert process.revoked == [owner]
    if how != "unshare":
        assert await process.shares.list(globex) == ()
    if how == "delete":
        again = await process.shares.create(acme, "team", author="key:1")
        assert again.id != owner.name


async def test_the_base_is_taken_back_too(process: "Process") -> None:
    acme, _, owner = await shared(process)
    await process.shares.share_base(acme, "team", False, author="key:1")
    assert unknown(process, "globex", "friends/tiny")
    assert not unknown(process, "globex", "friends/support")
    assert process.revoked == [owner]


async def test_only_the_owner_sees_and_changes_a_group(process: "Process") -> None:
    acme, globex, owner = await shared(process)
    mine, theirs = (await process.shares.list(acme))[0], (await process.shares.list(globex))[0]
    assert [member.tenant for member in mine.members] == ["acme", "globex"]
    assert [member.tenant for member in theirs.members] == ["globex"]
    for call in (
        process.shares.share(globex, "team", "support", 1, author="key:2"),
        process.shares.invite(globex, "friends", "acme", author="key:2"),
        process.shares.delete(globex, "friends", author="key:2"),
        process.shares.get(globex, "team"),
        process.shares.invite(acme, "team", "nobody", author="key:1"),
        process.shares.unshare(acme, "team", "other", author="key:1"),
        process.shares.share(acme, "team", "support", 9, author="key:1"),
    ):
        with pytest.raises(NotFound):
            await call
    for call in (
        process.shares.remove(acme, "team", "acme", author="key:1"),
        process.shares.leave(acme, owner.name, author="key:1"),
        process.shares.create(globex, "friends", author="key:2"),
        process.shares.create(acme, "team", author="key:1"),
    ):
        with pytest.raises(Conflict):
            await call
    assert process.revoked == []


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "a@b", ".a", "x" * 64])
async def test_a_group_s_name_can_be_told_from_what_it_shares(
    process: "Process", name: str
) -> None:
    acme = await process.tenant()
    with pytest.raises(InvalidRequest):
        await process.shares.create(acme, name, author="key:1")


async def test_every_change_is_audited(process: "Process") -> None:
    acme, _, owner = await shared(process)
    await process.shares.remove(acme, "team", "globex", author="key:1")
    entries = [e for e in await process.audit.entries() if e.target == f"group:{owner.name}"]
    assert [(e.tenant, e.action) for e in reversed(entries)] == [
        ("acme", "share.create"),
        ("acme", "share.put"),
        ("acme", "share.base"),
        ("acme", "share.invite"),
        ("globex", "share.accept"),
        ("acme", "share.remove"),
    ]
