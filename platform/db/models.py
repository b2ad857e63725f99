"""The record: every table, with the constraints that hold on SQLite and PostgreSQL alike.

Rows are never updated where history matters: an alias's moves are rows of `alias_change`, and a
revision keeps its row (and its usage) after its bytes are gone.
"""

from datetime import UTC, datetime

from advanced_alchemy.base import IdentityBase
from advanced_alchemy.types import DateTimeUTC
from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column, relationship

NAME_LENGTH = 128
DIGEST_LENGTH = 71
SLUG_LENGTH = 63
LIVE_STATES = ("checking", "ready")

TIMESTAMP = DateTimeUTC(timezone=True)


def _now() -> datetime:
    return datetime.now(UTC)


class Record(IdentityBase):
    """A table with an integer key that the database gives, and the time of its creation."""

    __abstract__ = True

    created_at: Mapped[datetime] = mapped_column(TIMESTAMP, default=_now)


class TenantRow(Record):
    """A tenant, its share of the engine against others', and its limits; NULL is unlimited."""

    __tablename__ = "tenant"
    __table_args__ = (CheckConstraint("state IN ('active', 'disabled')", name="state_known"),)

    slug: Mapped[str] = mapped_column(String(SLUG_LENGTH), unique=True)
    state: Mapped[str] = mapped_column(String(16), default="active")
    weight: Mapped[float] = mapped_column(Double, default=1.0, server_default=text("1.0"))
    requests_per_minute: Mapped[int | None]
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    concurrent_requests: Mapped[int | None]
    adapter_limit: Mapped[int | None]
    storage_bytes: Mapped[int | None] = mapped_column(BigInteger)


class ApiKeyRow(Record):
    """A key by its SHA-256: the secret has 256 random bits, so a fast hash is no weakness."""

    __tablename__ = "api_key"

    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenant.id"), index=True)
    key_hash: Mapped[str] = mapped_column(String(64), unique=True)
    prefix: Mapped[str] = mapped_column(String(16))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    expires_at: Mapped[datetime | None] = mapped_column(TIMESTAMP)
    revoked_at: Mapped[datetime | None] = mapped_column(TIMESTAMP)
    last_used_at: Mapped[datetime | None] = mapped_column(TIMESTAMP)

    tenant: Mapped[TenantRow] = relationship(lazy="raise")


class BaseRow(Record):
    """A base model at an exact digest; `config` is its config.json."""

    __tablename__ = "base"

    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH), unique=True)
    folder: Mapped[str] = mapped_column(Text)
    template_digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    config: Mapped[str] = mapped_column(Text)


class BlobRow(Record):
    """A folder in the blob store. Row and folder change under the lock of `route_version`."""

    __tablename__ = "blob"

    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH), unique=True)
    bytes: Mapped[int] = mapped_column(BigInteger)


class AdapterRow(Record):
    """A tenant's named line of revisions.

    route_version: the routing version at which its revisions or aliases last changed, so that
    snapshots load only what is newer than they are.
    """

    __tablename__ = "adapter"
    __table_args__ = (UniqueConstraint("tenant_id", "name", name="uq_adapter_tenant_name"),)

    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenant.id"))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    route_version: Mapped[int] = mapped_column(BigInteger, index=True)

    tenant: Mapped[TenantRow] = relationship(lazy="raise")
    revisions: Mapped[list["RevisionRow"]] = relationship(
        back_populates="adapter", order_by="RevisionRow.number.desc()", lazy="raise"
    )
    aliases: Mapped[list["AliasRow"]] = relationship(
        back_populates="adapter", order_by="AliasRow.name", lazy="raise"
    )


class RevisionRow(Record):
    """One upload. The digest is not a foreign key to `blob`: the row outlives the bytes.

    promote_alias: alias to move when it turns ready.  claimed_until: a process is checking it until
    then.  ended_at: when it stopped being live.  not_promoted: why `promote_alias` stayed.
    """

    __tablename__ = "revision"
    __table_args__ = (
        UniqueConstraint("adapter_id", "number", name="uq_revision_adapter_number"),
        CheckConstraint(
            "state IN ('checking', 'ready', 'failed', 'retired', 'quarantined')",
            name="state_known",
        ),
        Index(
            "uq_revision_live_content",
            "adapter_id",
            "base_id",
            "digest",
            unique=True,
            sqlite_where=text("state IN ('checking', 'ready')"),
            postgresql_where=text("state IN ('checking', 'ready')"),
        ),
        Index("ix_revision_digest_state", "digest", "state"),
    )

    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapter.id"))
    base_id: Mapped[int] = mapped_column(ForeignKey("base.id"))
    number: Mapped[int]
    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    state: Mapped[str] = mapped_column(String(16), default="checking", index=True)
    bytes: Mapped[int] = mapped_column(BigInteger)
    rank: Mapped[int]
    targets: Mapped[list[str]] = mapped_column(JSON)
    template_digest: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    ships_tokenizer: Mapped[bool] = mapped_column(default=False)
    max_logprob_diff: Mapped[float | None]
    failure: Mapped[str | None] = mapped_column(Text)
    author: Mapped[str] = mapped_column(String(NAME_LENGTH))
    promote_alias: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    not_promoted: Mapped[str | None] = mapped_column(Text)
    claimed_until: Mapped[datetime | None] = mapped_column(TIMESTAMP)
    ended_at: Mapped[datetime | None] = mapped_column(TIMESTAMP)

    adapter: Mapped[AdapterRow] = relationship(back_populates="revisions", lazy="raise")
    base: Mapped[BaseRow] = relationship(lazy="raise")


class AliasRow(Record):
    """A movable name on an adapter. Where it points is its newest change."""

    __tablename__ = "alias"
    __table_args__ = (UniqueConstraint("adapter_id", "name", name="uq_alias_adapter_name"),)

    adapter_id: Mapped[int] = mapped_column(ForeignKey("adapter.id"))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    version: Mapped[int]

    adapter: Mapped[AdapterRow] = relationship(back_populates="aliases", lazy="raise")
    changes: Mapped[list["AliasChangeRow"]] = relationship(
        back_populates="alias", order_by="AliasChangeRow.version.desc()", lazy="raise"
    )
    current: Mapped["AliasChangeRow"] = relationship(
        primaryjoin="and_(AliasChangeRow.alias_id == AliasRow.id,"
        " AliasChangeRow.version == AliasRow.version)",
        viewonly=True,
        lazy="raise",
    )


class AliasChangeRow(Record):
    """One move of an alias, `version` from 1. A rollback says which version it restores."""

    __tablename__ = "alias_change"
    __table_args__ = (UniqueConstraint("alias_id", "version", name="uq_alias_change_version"),)

    alias_id: Mapped[int] = mapped_column(ForeignKey("alias.id"))
    version: Mapped[int]
    revision_id: Mapped[int] = mapped_column(ForeignKey("revision.id"))
    author: Mapped[str] = mapped_column(String(NAME_LENGTH))
    reason: Mapped[str | None] = mapped_column(Text)
    restores: Mapped[int | None]

    alias: Mapped[AliasRow] = relationship(back_populates="changes", lazy="raise")
    revision: Mapped[RevisionRow] = relationship(lazy="raise")


class RouteVersionRow(IdentityBase):
    """One row: the version of all routing state, raised within each change's transaction."""

    __tablename__ = "route_version"

    version: Mapped[int] = mapped_column(BigInteger)


class UsageRow(Record):
    """One finished request. Names and numbers are copied: usage outlives what it names."""

    __tablename__ = "usage"
    __table_args__ = (
        Index("ix_usage_tenant_time", "tenant_id", "created_at"),
        Index("ix_usage_adapter_time", "tenant_id", "adapter", "revision", "created_at"),
        Index("ix_usage_time", "created_at"),
    )

    request_id: Mapped[str] = mapped_column(String(NAME_LENGTH), unique=True)
    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenant.id"))
    key_id: Mapped[int | None] = mapped_column(ForeignKey("api_key.id"))
    endpoint: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(Text)
    adapter: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    revision: Mapped[int | None]
    adapter_digest: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    fingerprint: Mapped[str] = mapped_column(String(64))
    finish_reason: Mapped[str] = mapped_column(String(32))
    prompt_tokens: Mapped[int]
    completion_tokens: Mapped[int]
    cached_tokens: Mapped[int]
    accepted_draft_tokens: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    rejected_draft_tokens: Mapped[int] = mapped_column(default=0, server_default=text("0"))
    queue_time: Mapped[float]
    ttft: Mapped[float | None]
    itl: Mapped[float | None]
    duration: Mapped[float]


class AuditRow(Record):
    """Who changed what; `before` and `after` are JSON texts."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_tenant", "tenant_id", "id"),)

    tenant_id: Mapped[int | None] = mapped_column(ForeignKey("tenant.id"))
    author: Mapped[str] = mapped_column(String(NAME_LENGTH))
    action: Mapped[str] = mapped_column(String(64))
    target: Mapped[str] = mapped_column(Text)
    before: Mapped[str | None] = mapped_column(Text)
    after: Mapped[str | None] = mapped_column(Text)
