"""Draft heads of bases and of revisions.

Revision: 0004, after 0003.
"""

import sqlalchemy as sa
from advanced_alchemy.types import DateTimeUTC
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = DateTimeUTC(timezone=True)
UNIQUE = {
    "uq_draft_head_base_number": (["base_id", "number"], "revision_id IS NULL"),
    "uq_draft_head_revision_number": (["revision_id", "number"], "revision_id IS NOT NULL"),
    "uq_draft_head_base_promoted": (["base_id"], "revision_id IS NULL AND promoted"),
    "uq_draft_head_revision_promoted": (["revision_id"], "revision_id IS NOT NULL AND promoted"),
}


def upgrade() -> None:
    op.create_table(
        "draft_head",
        sa.Column("id", KEY, sa.Identity(start=1, increment=1), nullable=False),
        sa.Column("base_id", KEY, nullable=False),
        sa.Column("revision_id", KEY, nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("shared_digest", sa.String(length=71), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("promoted", sa.Boolean(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.Column("drafts", sa.Integer(), nullable=False),
        sa.Column("training", sa.Text(), nullable=True),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.CheckConstraint("state IN ('ready', 'retired')", name=op.f("ck_draft_head_state_known")),
        sa.CheckConstraint(
            "state = 'ready' OR NOT promoted", name=op.f("ck_draft_head_promoted_is_ready")
        ),
        sa.CheckConstraint(
            "(revision_id IS NULL) = (shared_digest IS NULL)",
            name=op.f("ck_draft_head_delta_or_shared"),
        ),
        sa.ForeignKeyConstraint(["base_id"], ["base.id"], name=op.f("fk_draft_head_base_id_base")),
        sa.ForeignKeyConstraint(
            ["revision_id"], ["revision.id"], name=op.f("fk_draft_head_revision_id_revision")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_draft_head")),
    )
    for name, (columns, where) in UNIQUE.items():
        condition = sa.text(where)
        op.create_index(
            name,
            "draft_head",
            columns,
            unique=True,
            sqlite_where=condition,
            postgresql_where=condition,
        )
    op.create_index("ix_draft_head_digest_state", "draft_head", ["digest", "state"])
    op.create_index("ix_draft_head_shared_digest", "draft_head", ["shared_digest"])


def downgrade() -> None:
    op.drop_table("draft_head")
