"""The record of draft heads: which there are for a base and for each revision, and which drafts."""

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column, relationship

from polyloom.platform.db.models import (
    DIGEST_LENGTH,
    NAME_LENGTH,
    TIMESTAMP,
    BaseRow,
    Record,
    RevisionRow,
)

_SHARED = text("revision_id IS NULL")
_OWN = text("revision_id IS NOT NULL")
_SHARED_PROMOTED = text("revision_id IS NULL AND promoted")
_OWN_PROMOTED = text("revision_id IS NOT NULL AND promoted")


class DraftHeadRow(Record):
    """One uploaded head: a base's shared one (no revision), or a revision's delta on one.

    number: from 1, of the revision or of the base.  shared_digest: of the head that a delta is on.
    promoted: requests draft with it.  training: the artefact's training record, as JSON.
    """

    __tablename__ = "draft_head"
    __table_args__ = (
        CheckConstraint("state IN ('ready', 'retired')", name="state_known"),
        CheckConstraint("state = 'ready' OR NOT promoted", name="promoted_is_ready"),
        CheckConstraint("(revision_id IS NULL) = (shared_digest IS NULL)", name="delta_or_shared"),
        *(
            Index(name, *columns, unique=True, sqlite_where=where, postgresql_where=where)
            for name, columns, where in (
                ("uq_draft_head_base_number", ("base_id", "number"), _SHARED),
                ("uq_draft_head_revision_number", ("revision_id", "number"), _OWN),
                ("uq_draft_head_base_promoted", ("base_id",), _SHARED_PROMOTED),
                ("uq_draft_head_revision_promoted", ("revision_id",), _OWN_PROMOTED),
            )
        ),
        Index("ix_draft_head_digest_state", "digest", "state"),
        Index("ix_draft_head_shared_digest", "shared_digest"),
    )

    base_id: Mapped[int] = mapped_column(ForeignKey("base.id"))
    revision_id: Mapped[int | None] = mapped_column(ForeignKey("revision.id"))
    number: Mapped[int]
    digest: Mapped[str] = mapped_column(String(DIGEST_LENGTH))
    shared_digest: Mapped[str | None] = mapped_column(String(DIGEST_LENGTH))
    state: Mapped[str] = mapped_column(String(16), default="ready")
    promoted: Mapped[bool] = mapped_column(default=False)
    bytes: Mapped[int] = mapped_column(BigInteger)
    rank: Mapped[int | None]
    drafts: Mapped[int]
    training: Mapped[str | None] = mapped_column(Text)
    author: Mapped[str] = mapped_column(String(NAME_LENGTH))
    ended_at: Mapped[datetime | None] = mapped_column(TIMESTAMP)

    base: Mapped[BaseRow] = relationship(lazy="raise")
    revision: Mapped[RevisionRow | None] = relationship(lazy="raise")
