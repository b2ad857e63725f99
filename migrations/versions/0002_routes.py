"""Routes, promotion gates, share groups, and tenants' weights.

Revision: 0002, after 0001.
"""

import sqlalchemy as sa
from advanced_alchemy.types import DateTimeUTC
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = DateTimeUTC(timezone=True)


def _key() -> sa.Column[int]:
    return sa.Column("id", KEY, sa.Identity(start=1, increment=1), nullable=False)


def upgrade() -> None:
    op.add_column(
        "tenant", sa.Column("weight", sa.Double(), server_default=sa.text("1.0"), nullable=False)
    )
    op.add_column("revision", sa.Column("not_promoted", sa.Text(), nullable=True))
    _create_routes()
    _create_gates()
    _create_share_groups()


def _create_routes() -> None:
    op.create_table(
        "route",
        _key(),
        sa.Column("tenant_id", KEY, nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("route_version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenant.id"], name=op.f("fk_route_tenant_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_route")),
        sa.UniqueConstraint("tenant_id", "name", name="uq_route_tenant_name"),
    )
    op.create_index(op.f("ix_route_route_version"), "route", ["route_version"], unique=False)
    op.create_table(
        "route_change",
        _key(),
        sa.Column("route_id", KEY, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("targets", sa.JSON(), nullable=False),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("restores", sa.Integer(), nullable=True),
        sa.Column("route_version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["route_id"], ["route.id"], name=op.f("fk_route_change_route_id_route")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_route_change")),
        sa.UniqueConstraint("route_id", "version", name="uq_route_change_version"),
    )


def _create_gates() -> None:
    op.create_table(
        "gate",
        _key(),
        sa.Column("adapter_id", KEY, nullable=True),
        sa.Column("route_id", KEY, nullable=True),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("prompts", sa.JSON(), nullable=False),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.CheckConstraint(
            "(adapter_id IS NULL) <> (route_id IS NULL)", name=op.f("ck_gate_one_subject")
        ),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapter.id"], name=op.f("fk_gate_adapter_id_adapter")
        ),
        sa.ForeignKeyConstraint(["route_id"], ["route.id"], name=op.f("fk_gate_route_id_route")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gate")),
        sa.UniqueConstraint("adapter_id", name=op.f("uq_gate_adapter_id")),
        sa.UniqueConstraint("route_id", name=op.f("uq_gate_route_id")),
    )
    op.create_table(
        "gate_run",
        _key(),
        sa.Column("gate_id", KEY, nullable=False),
        sa.Column("gate_version", sa.Integer(), nullable=False),
        sa.Column("candidate", sa.Text(), nullable=False),
        sa.Column("adapter_digest", sa.String(length=71), nullable=True),
        sa.Column("passed", sa.Boolean(), nullable=False),
        sa.Column("results", sa.JSON(), nullable=False),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["gate_id"], ["gate.id"], name=op.f("fk_gate_run_gate_id_gate")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gate_run")),
    )
    op.create_index("ix_gate_run_gate", "gate_run", ["gate_id", "id"], unique=False)


def _create_share_groups() -> None:
    op.create_table(
        "share_group",
        _key(),
        sa.Column("uid", sa.String(length=32), nullable=False),
        sa.Column("owner_id", KEY, nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("shares_base", sa.Boolean(), nullable=False),
        sa.Column("route_version", sa.BigInteger(), nullable=False),
        sa.Column("deleted_at", TIME, nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["owner_id"], ["tenant.id"], name=op.f("fk_share_group_owner_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_share_group")),
        sa.UniqueConstraint("uid", name=op.f("uq_share_group_uid")),
    )
    op.create_index(op.f("ix_share_group_owner_id"), "share_group", ["owner_id"], unique=False)
    op.create_index(
        op.f("ix_share_group_route_version"), "share_group", ["route_version"], unique=False
    )
    op.create_table(
        "share_member",
        _key(),
        sa.Column("group_id", KEY, nullable=False),
        sa.Column("tenant_id", KEY, nullable=False),
        sa.Column("mount", sa.String(length=63), nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["group_id"], ["share_group.id"], name=op.f("fk_share_member_group_id_share_group")
        ),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenant.id"], name=op.f("fk_share_member_tenant_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_share_member")),
        sa.UniqueConstraint("group_id", "tenant_id", name="uq_share_member_group_tenant"),
        sa.UniqueConstraint("tenant_id", "mount", name="uq_share_member_tenant_mount"),
    )
    op.create_table(
        "shared_revision",
        _key(),
        sa.Column("group_id", KEY, nullable=False),
        sa.Column("adapter_id", KEY, nullable=False),
        sa.Column("revision_id", KEY, nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapter.id"], name=op.f("fk_shared_revision_adapter_id_adapter")
        ),
        sa.ForeignKeyConstraint(
            ["group_id"], ["share_group.id"], name=op.f("fk_shared_revision_group_id_share_group")
        ),
        sa.ForeignKeyConstraint(
            ["revision_id"], ["revision.id"], name=op.f("fk_shared_revision_revision_id_revision")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_shared_revision")),
        sa.UniqueConstraint("group_id", "adapter_id", name="uq_shared_revision_group_adapter"),
    )


def downgrade() -> None:
    for table in (
        "shared_revision",
        "share_member",
        "share_group",
        "gate_run",
        "gate",
        "route_change",
        "route",
    ):
        op.drop_table(table)
    op.drop_column("revision", "not_promoted")
    op.drop_column("tenant", "weight")
