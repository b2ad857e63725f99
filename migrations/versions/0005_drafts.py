"""Drafted tokens of each request, and how routes want theirs drafted.

Revision: 0005, after 0004.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

COUNTS = ("accepted_draft_tokens", "rejected_draft_tokens")


def upgrade() -> None:
    for name in COUNTS:
        op.add_column(
            "usage", sa.Column(name, sa.Integer(), server_default=sa.text("0"), nullable=False)
        )
    op.add_column("route_change", sa.Column("drafts", sa.String(length=16), nullable=True))


def downgrade() -> None:
    op.drop_column("route_change", "drafts")
    for name in COUNTS:
        op.drop_column("usage", name)
