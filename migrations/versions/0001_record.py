"""The record: tenants, keys, bases, adapters and their revisions, usage, audit.

Revision: 0001, the first.
"""

import sqlalchemy as sa
from advanced_alchemy.types import DateTimeUTC
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
TIME = DateTimeUTC(timezone=True)
LIVE = sa.text("state IN ('checking', 'ready')")


def _key() -> sa.Column[int]:
    return sa.Column("id", KEY, sa.Identity(start=1, increment=1), nullable=False)


def upgrade() -> None:
    op.create_table(
        "base",
        _key(),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("template_digest", sa.String(length=71), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_base")),
        sa.UniqueConstraint("digest", name=op.f("uq_base_digest")),
    )
    op.create_table(
        "blob",
        _key(),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_blob")),
        sa.UniqueConstraint("digest", name=op.f("uq_blob_digest")),
    )
    op.create_table(
        "route_version",
        _key(),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_route_version")),
    )
    op.create_table(
        "tenant",
        _key(),
        sa.Column("slug", sa.String(length=63), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("requests_per_minute", sa.Integer(), nullable=True),
        sa.Column("tokens_per_minute", sa.BigInteger(), nullable=True),
        sa.Column("concurrent_requests", sa.Integer(), nullable=True),
        sa.Column("adapter_limit", sa.Integer(), nullable=True),
        sa.Column("storage_bytes", sa.BigInteger(), nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.CheckConstraint("state IN ('active', 'disabled')", name=op.f("ck_tenant_state_known")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenant")),
        sa.UniqueConstraint("slug", name=op.f("uq_tenant_slug")),
    )
    op.create_table(
        "adapter",
        _key(),
        sa.Column("tenant_id", KEY, nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("route_version", sa.BigInteger(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenant.id"], name=op.f("fk_adapter_tenant_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapter")),
        sa.UniqueConstraint("tenant_id", "name", name="uq_adapter_tenant_name"),
    )
    op.create_index(op.f("ix_adapter_route_version"), "adapter", ["route_version"], unique=False)
    op.create_table(
        "api_key",
        _key(),
        sa.Column("tenant_id", KEY, nullable=False),
        sa.Column("key_hash", sa.String(length=64), nullable=False),
        sa.Column("prefix", sa.String(length=16), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("expires_at", TIME, nullable=True),
        sa.Column("revoked_at", TIME, nullable=True),
        sa.Column("last_used_at", TIME, nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenant.id"], name=op.f("fk_api_key_tenant_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_key")),
        sa.UniqueConstraint("key_hash", name=op.f("uq_api_key_key_hash")),
    )
    op.create_index(op.f("ix_api_key_tenant_id"), "api_key", ["tenant_id"], unique=False)
    op.create_table(
        "audit",
        _key(),
        sa.Column("tenant_id", KEY, nullable=True),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("before", sa.Text(), nullable=True),
        sa.Column("after", sa.Text(), nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenant.id"], name=op.f("fk_audit_tenant_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index("ix_audit_tenant", "audit", ["tenant_id", "id"], unique=False)
    op.create_table(
        "alias",
        _key(),
        sa.Column("adapter_id", KEY, nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapter.id"], name=op.f("fk_alias_adapter_id_adapter")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alias")),
        sa.UniqueConstraint("adapter_id", "name", name="uq_alias_adapter_name"),
    )
    op.create_table(
        "revision",
        _key(),
        sa.Column("adapter_id", KEY, nullable=False),
        sa.Column("base_id", KEY, nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=71), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("targets", sa.JSON(), nullable=False),
        sa.Column("template_digest", sa.String(length=71), nullable=True),
        sa.Column("ships_tokenizer", sa.Boolean(), nullable=False),
        sa.Column("max_logprob_diff", sa.Double(), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("promote_alias", sa.String(length=128), nullable=True),
        sa.Column("claimed_until", TIME, nullable=True),
        sa.Column("ended_at", TIME, nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.CheckConstraint(
            "state IN ('checking', 'ready', 'failed', 'retired', 'quarantined')",
            name=op.f("ck_revision_state_known"),
        ),
        sa.ForeignKeyConstraint(
            ["adapter_id"], ["adapter.id"], name=op.f("fk_revision_adapter_id_adapter")
        ),
        sa.ForeignKeyConstraint(["base_id"], ["base.id"], name=op.f("fk_revision_base_id_base")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_revision")),
        sa.UniqueConstraint("adapter_id", "number", name="uq_revision_adapter_number"),
    )
    op.create_index("ix_revision_digest_state", "revision", ["digest", "state"], unique=False)
    op.create_index(op.f("ix_revision_state"), "revision", ["state"], unique=False)
    op.create_index(
        "uq_revision_live_content",
        "revision",
        ["adapter_id", "base_id", "digest"],
        unique=True,
        sqlite_where=LIVE,
        postgresql_where=LIVE,
    )
    op.create_table(
        "usage",
        _key(),
        sa.Column("request_id", sa.String(length=128), nullable=False),
        sa.Column("tenant_id", KEY, nullable=False),
        sa.Column("key_id", KEY, nullable=True),
        sa.Column("endpoint", sa.String(length=64), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("adapter", sa.String(length=128), nullable=True),
        sa.Column("revision", sa.Integer(), nullable=True),
        sa.Column("adapter_digest", sa.String(length=71), nullable=True),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("finish_reason", sa.String(length=32), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("completion_tokens", sa.Integer(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("queue_time", sa.Double(), nullable=False),
        sa.Column("ttft", sa.Double(), nullable=True),
        sa.Column("itl", sa.Double(), nullable=True),
        sa.Column("duration", sa.Double(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_key.id"], name=op.f("fk_usage_key_id_api_key")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenant.id"], name=op.f("fk_usage_tenant_id_tenant")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_usage")),
        sa.UniqueConstraint("request_id", name=op.f("uq_usage_request_id")),
    )
    op.create_index(
        "ix_usage_adapter_time",
        "usage",
        ["tenant_id", "adapter", "revision", "created_at"],
        unique=False,
    )
    op.create_index("ix_usage_tenant_time", "usage", ["tenant_id", "created_at"], unique=False)
    op.create_index("ix_usage_time", "usage", ["created_at"], unique=False)
    op.create_table(
        "alias_change",
        _key(),
        sa.Column("alias_id", KEY, nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("revision_id", KEY, nullable=False),
        sa.Column("author", sa.String(length=128), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("restores", sa.Integer(), nullable=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["alias_id"], ["alias.id"], name=op.f("fk_alias_change_alias_id_alias")
        ),
        sa.ForeignKeyConstraint(
            ["revision_id"], ["revision.id"], name=op.f("fk_alias_change_revision_id_revision")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alias_change")),
        sa.UniqueConstraint("alias_id", "version", name="uq_alias_change_version"),
    )
    op.bulk_insert(
        sa.table("route_version", sa.column("version", sa.BigInteger())), [{"version": 1}]
    )


def downgrade() -> None:
    op.drop_table("alias_change")
    op.drop_table("usage")
    op.drop_table("revision")
    op.drop_table("alias")
    op.drop_table("audit")
    op.drop_table("api_key")
    op.drop_table("adapter")
    op.drop_table("tenant")
    op.drop_table("route_version")
    op.drop_table("blob")
    op.drop_table("base")
