"""Tables of routes, their gates and share groups. They change under the lock of `route_version`."""

from datetime import datetime

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, mapped_column, relationship

from polyloom.platform.db.models import (
    DIGEST_LENGTH,
    NAME_LENGTH,
    SLUG_LENGTH,
    TIMESTAMP,
    AdapterRow,
    Record,
    RevisionRow,
    TenantRow,
)


class RouteRow(Record):
    """A tenant's route. What it does is its newest change; one without targets is deleted.

    route_version: the routing version at which it last changed.
    """

    __tablename__ = "route"
    __table_args__ = (UniqueConstraint("tenant_id", "name", name="uq_route_tenant_name"),)

    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenant.id"))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    version: Mapped[int]
    route_version: Mapped[int] = mapped_column(BigInteger, index=True)

    tenant: Mapped[TenantRow] = relationship(lazy="raise")
    changes: Mapped[list["RouteChangeRow"]] = relationship(
        back_populates="route", order_by="RouteChangeRow.version.desc()", lazy="raise"
    )
    current: Mapped["RouteChangeRow"] = relationship(
        primaryjoin="and_(RouteChangeRow.route_id == RouteRow.id,"
        " RouteChangeRow.version == RouteRow.version)",
        viewonly=True,
        lazy="raise",
    )


class RouteChangeRow(Record):
    """One version of a route, from 1.

    targets: `{"model": …, "weight": …}` each; none for a deletion.  drafts: how its requests' tokens
    are drafted, a policy's name or a length; NULL for the server's way.  restores: the version that
    a rollback went back to.  route_version: the version of all routing state that brought it.
    """

    __tablename__ = "route_change"
    __table_args__ = (UniqueConstraint("route_id", "version", name="uq_route_change_version"),)

    route_id: Mapped[int] = mapped_column(ForeignKey("route.id"))
    version: Mapped[int]
    targets: Mapped[list[dict[str, str | int]]] = mapped_column(JSON)
    drafts: Mapped[str | None] = mapped_column(String(16))
    author: Mapped[str] = mapped_column(String(NAME_LENGTH))
    reason: Mapped[str | None] = mapped_column(Text)
    restores: Mapped[int | None]
    route_version: Mapped[int] = mapped_column(BigInteger)

    route: Mapped[RouteRow] = relationship(back_populates="changes", lazy="raise")


class GateRow(Record):
    """Golden prompts of an adapter or of a route. `version` counts their changes from 1."""

    __tablename__ = "gate"
    __table_args__ = (
        CheckConstraint("(adapter_id IS NULL) <> (route_id IS NULL)", name="one_subject"),
    )

    adapter_id: Mapped[int | None] = mapped_column(ForeignKey("adapter.id"), unique=True)
    route_id: Mapped[int | None] = mapped_column(ForeignKey("route.id"), unique=True)
    version: Mapped[int]
    prompts: Mapped[list[dict[str, object]]] = mapped_column(JSON)
    author: Mapped[str] = mapped_column(String(NAME_LENGTH))


class GateRunRow(Record):
    """A candidate's answers to a gate at one of its versions."""

    __tablename__ = "gate_run"
    __table_args__ = (Index("ix_gate_run_gate", "gate_id", "id"),)

    gate_id: Mapped[int] = mapped_column(ForeignKey("gate.id"))
    gate_version: Mapped[int]
    candidate: Mapped[str] = mapped_column(Text)
    adapter_digest: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    passed: Mapped[bool]
    results: Mapped[list[dict[str, object]]] = mapped_column(JSON)
    author: Mapped[str] = mapped_column(String(NAME_LENGTH))


class ShareGroupRow(Record):
    """Tenants that share revisions, the base's prefixes, and a prefix cache of their own.

    uid: names its cache; never given twice.  deleted_at: snapshots must hear of its end.
    """

    __tablename__ = "share_group"

    uid: Mapped[str] = mapped_column(String(32), unique=True)
    owner_id: Mapped[int] = mapped_column(ForeignKey("tenant.id"), index=True)
    name: Mapped[str] = mapped_column(String(SLUG_LENGTH))
    shares_base: Mapped[bool] = mapped_column(default=False)
    route_version: Mapped[int] = mapped_column(BigInteger, index=True)
    deleted_at: Mapped[datetime | None] = mapped_column(TIMESTAMP)

    owner: Mapped[TenantRow] = relationship(lazy="raise")
    members: Mapped[list["ShareMemberRow"]] = relationship(
        order_by="ShareMemberRow.id", lazy="raise", cascade="all, delete-orphan"
    )
    revisions: Mapped[list["SharedRevisionRow"]] = relationship(
        order_by="SharedRevisionRow.id", lazy="raise", cascade="all, delete-orphan"
    )


class ShareMemberRow(Record):
    """A tenant in a group, its owner too. `mount`: what the tenant calls the group in `model`; NULL
    until it has accepted the invitation."""

    __tablename__ = "share_member"
    __table_args__ = (
        UniqueConstraint("group_id", "tenant_id", name="uq_share_member_group_tenant"),
        UniqueConstraint("tenant_id", "mount", name="uq_share_member_tenant_mount"),
    )

    group_id: Mapped[int] = mapped_column(ForeignKey("share_group.id"))
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenant.id"))
    mount: Mapped[str | None] = mapped_column(String(SLUG_LENGTH))

    tenant: Mapped[TenantRow] = relationship(lazy="raise")


class SharedRevisionRow(Record):
    """The one revision of an adapter that a group shares."""

    __tablename__ = "shared_revision"
    __table_args__ = (
        UniqueConstraint("group_id", "adapter_id", name="uq_shared_revision_group_adapter"),
    )

    group_id: Mapped[int] = mapped_column(ForeignKey("share_group.id"))
    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapter.id"))
    revision_id: Mapped[int] = mapped_column(ForeignKey("revision.id"))

    adapter: Mapped[AdapterRow] = relationship(lazy="raise")
    revision: Mapped[RevisionRow] = relationship(lazy="raise")
