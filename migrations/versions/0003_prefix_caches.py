"""Prefix caches: namespaces, counters, holds, invalidations.

Revision: 0003, after 0002.
"""

import sqlalchemy as sa
from advanced_alchemy.types import DateTimeUTC
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = DateTimeUTC(timezone=True)


def _key() -> sa.Column[int]:
    return sa.Column("id", KEY, sa.Identity(start=1, increment=1), nullable=False)


def upgrade() -> None:
    op.create_table(
        "prefix_namespace",
        _key(),
        sa.Column("owner_kind", sa.String(length=8), nullable=False),
        sa.Column("owner_name", sa.String(length=128), nullable=False),
        sa.Column("base_digest", sa.String(length=71), nullable=False),
        sa.Column("adapter_digest", sa.String(length=71), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.CheckConstraint(
            "owner_kind IN ('tenant', 'group')", name=op.f("ck_prefix_namespace_owner_kind_known")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prefix_namespace")),
        sa.UniqueConstraint(
            "owner_kind",
            "owner_name",
            "base_digest",
            "adapter_digest",
            name="uq_prefix_namespace_identity",
        ),
    )
    op.create_table(
        "prefix_boot",
        _key(),
        sa.Column("boot", sa.String(length=64), nullable=False),
        sa.Column("seen_at", TIME, nullable=False),
        sa.Column("folded", sa.Boolean(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prefix_boot")),
        sa.UniqueConstraint("boot", name=op.f("uq_prefix_boot_boot")),
    )
    op.create_index(op.f("ix_prefix_boot_seen_at"), "prefix_boot", ["seen_at"], unique=False)
    op.create_table(
        "prefix_counter",
        _key(),
        sa.Column("namespace_id", KEY, nullable=False),
        sa.Column("boot", sa.String(length=64), nullable=False),
        sa.Column("eligible", sa.BigInteger(), nullable=False),
        sa.Column("hits", sa.BigInteger(), nullable=False),
        sa.Column("tokens_reused", sa.BigInteger(), nullable=False),
        sa.Column("bytes_reused", sa.BigInteger(), nullable=False),
        sa.Column("saved", sa.Double(), nullable=False),
        sa.Column("evictions", sa.BigInteger(), nullable=False),
        sa.Column("invalidations", sa.JSON(), nullable=False),
        sa.Column("misses", sa.JSON(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["namespace_id"],
            ["prefix_namespace.id"],
            name=op.f("fk_prefix_counter_namespace_id_prefix_namespace"),
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prefix_counter")),
        sa.UniqueConstraint("namespace_id", "boot", name="uq_prefix_counter_namespace_boot"),
    )
    op.create_index(op.f("ix_prefix_counter_boot"), "prefix_counter", ["boot"], unique=False)
    op.create_table(
        "prefix_hold",
        _key(),
        sa.Column("tenant_id", KEY, nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenant.id"], name=op.f("fk_prefix_hold_tenant_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prefix_hold")),
        sa.UniqueConstraint("tenant_id", "name", name="uq_prefix_hold_tenant_name"),
    )
    op.create_table(
        "prefix_invalidation",
        _key(),
        sa.Column("cause", sa.String(length=32), nullable=False),
        sa.Column("owner_kind", sa.String(length=8), nullable=True),
        sa.Column("owner_name", sa.String(length=128), nullable=True),
        sa.Column("base_digest", sa.String(length=71), nullable=True),
        sa.Column("adapter_digest", sa.String(length=71), nullable=True),
        sa.Column("template_digest", sa.String(length=71), nullable=True),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("blocks_freed", sa.Integer(), nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_prefix_invalidation")),
    )
    op.create_index(
        "ix_prefix_invalidation_owner",
        "prefix_invalidation",
        ["owner_kind", "owner_name"],
        unique=False,
    )


def downgrade() -> None:
    for name in (
        "prefix_invalidation",
        "prefix_hold",
        "prefix_counter",
        "prefix_boot",
        "prefix_namespace",
    ):
        op.drop_table(name)
