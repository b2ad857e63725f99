"""The record of prefix caches: whose they are, what they gave, what is held, what was dropped.

A namespace's row stands for every salt, template and tool schema of its (owner, base, revision):
those live in the keys of the blocks alone, so clients cannot make rows without bound.
"""

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
from sqlalchemy.orm import Mapped, mapped_column

from polyloom.platform.db.models import DIGEST_LENGTH, NAME_LENGTH, TIMESTAMP, Record

BOOT_LENGTH = 64
PAST = ""
"""In place of a boot: the sum of all engine processes whose own rows were folded."""
NO_ADAPTER = ""
"""In place of an adapter's digest: NULLs would not be unique."""


class PrefixNamespaceRow(Record):
    """All prefix caches of one owner on one base and one revision (or none)."""

    __tablename__ = "prefix_namespace"
    __table_args__ = (
        UniqueConstraint(
            "owner_kind",
            "owner_name",
            "base_digest",
            "adapter_digest",
            name="uq_prefix_namespace_identity",
        ),
        CheckConstraint("owner_kind IN ('tenant', 'group')", name="owner_kind_known"),
    )

    owner_kind: Mapped[str] = mapped_column(String(8))
    owner_name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    base_digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    adapter_digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH), default=NO_ADAPTER)


class PrefixBootRow(Record):
    """An engine process that reported. folded: its counters are in the sum of the past, and what
    still comes of it is too late."""

    __tablename__ = "prefix_boot"

    boot: Mapped[str] = mapped_column(String(BOOT_LENGTH), unique=True)
    seen_at: Mapped[datetime] = mapped_column(TIMESTAMP, index=True)
    folded: Mapped[bool] = mapped_column(default=False)


class PrefixCounterRow(Record):
    """A namespace's counters in one engine process, as that process last reported them, or the sum
    over processes that are `PAST`."""

    __tablename__ = "prefix_counter"
    __table_args__ = (
        UniqueConstraint("namespace_id", "boot", name="uq_prefix_counter_namespace_boot"),
    )

    namespace_id: Mapped[int] = mapped_column(ForeignKey("prefix_namespace.id"))
    boot: Mapped[str] = mapped_column(String(BOOT_LENGTH), index=True)
    eligible: Mapped[int] = mapped_column(BigInteger, default=0)
    hits: Mapped[int] = mapped_column(BigInteger, default=0)
    tokens_reused: Mapped[int] = mapped_column(BigInteger, default=0)
    bytes_reused: Mapped[int] = mapped_column(BigInteger, default=0)
    saved: Mapped[float] = mapped_column(default=0.0)
    evictions: Mapped[int] = mapped_column(BigInteger, default=0)
    invalidations: Mapped[dict[str, int]] = mapped_column(JSON, default=dict)
    misses: Mapped[dict[str, int]] = mapped_column(JSON, default=dict)


class PrefixHoldRow(Record):
    """A named prefix that a tenant wants warm. `request` is the body as it was sent.

    tokens: of the prefix when it was last warmed.  failure: why it is not warm; NULL if it is, or
    is on its way.
    """

    __tablename__ = "prefix_hold"
    __table_args__ = (UniqueConstraint("tenant_id", "name", name="uq_prefix_hold_tenant_name"),)

    tenant_id: Mapped[int] = mapped_column(ForeignKey("tenant.id"))
    name: Mapped[str] = mapped_column(String(NAME_LENGTH))
    request: Mapped[str] = mapped_column(Text)
    tokens: Mapped[int] = mapped_column(default=0)
    failure: Mapped[str | None] = mapped_column(Text)
    author: Mapped[str] = mapped_column(String(NAME_LENGTH))


class PrefixInvalidationRow(Record):
    """Cached blocks that became unreachable; NULL stands for any.

    blocks_freed: in the process that asked for it; NULL while that is not known.
    """

    __tablename__ = "prefix_invalidation"
    __table_args__ = (Index("ix_prefix_invalidation_owner", "owner_kind", "owner_name"),)

    cause: Mapped[str] = mapped_column(String(32))
    owner_kind: Mapped[str | None] = mapped_column(String(8))
    owner_name: Mapped[str | None] = mapped_column(String(NAME_LENGTH))
    base_digest: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    adapter_digest: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    template_digest: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    author: Mapped[str] = mapped_column(String(NAME_LENGTH))
    blocks_freed: Mapped[int | None]
