"""Table rows as the values that the services hand out."""

from typing import cast

from polyloom.adapters.source import AdapterSource, DraftHeadSource
from polyloom.platform.db.models import (
    AdapterRow,
    AliasChangeRow,
    AliasRow,
    ApiKeyRow,
    BaseRow,
    RevisionRow,
    TenantRow,
)
from polyloom.platform.services.views import (
    AdapterView,
    AliasChangeView,
    AliasView,
    BaseView,
    KeyView,
    RevisionState,
    RevisionView,
    Scope,
    TenantLimits,
    TenantState,
    TenantView,
)
from polyloom.routing.snapshot import RevisionEntry


def tenant_view(row: TenantRow) -> TenantView:
    """Needs nothing loaded beside the row."""
    return TenantView(
        id=row.id,
        slug=row.slug,
        state=cast(TenantState, row.state),
        limits=TenantLimits(
            requests_per_minute=row.requests_per_minute,
            tokens_per_minute=row.tokens_per_minute,
            concurrent_requests=row.concurrent_requests,
            adapters=row.adapter_limit,
            storage_bytes=row.storage_bytes,
        ),
        created_at=row.created_at,
        weight=row.weight,
    )


def key_view(row: ApiKeyRow) -> KeyView:
    """Needs nothing loaded beside the row."""
    return KeyView(
        id=row.id,
        prefix=row.prefix,
        scopes=cast(tuple[Scope, ...], tuple(row.scopes)),
        created_at=row.created_at,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )


def base_view(row: BaseRow) -> BaseView:
    """Needs nothing loaded beside the row."""
    return BaseView(
        id=row.id,
        name=row.name,
        digest=row.digest,
        folder=row.folder,
        template_digest=row.template_digest,
        created_at=row.created_at,
    )


def revision_view(row: RevisionRow, adapter: AdapterRow, base: BaseRow) -> RevisionView:
    """Needs the adapter's tenant loaded."""
    return RevisionView(
        id=row.id,
        tenant=adapter.tenant.slug,
        adapter=adapter.name,
        number=row.number,
        digest=row.digest,
        state=cast(RevisionState, row.state),
        base=base.name,
        base_digest=base.digest,
        bytes=row.bytes,
        rank=row.rank,
        targets=tuple(row.targets),
        max_logprob_diff=row.max_logprob_diff,
        failure=row.failure,
        author=row.author,
        created_at=row.created_at,
        ended_at=row.ended_at,
        not_promoted=row.not_promoted,
    )


def alias_view(alias: AliasRow, adapter_name: str, current: AliasChangeRow) -> AliasView:
    """Needs the change's revision loaded."""
    return AliasView(
        name=alias.name,
        adapter=adapter_name,
        number=current.revision.number,
        digest=current.revision.digest,
        version=current.version,
        changed_at=current.created_at,
        author=current.author,
    )


def alias_change_view(row: AliasChangeRow) -> AliasChangeView:
    """Needs the change's revision loaded."""
    return AliasChangeView(
        version=row.version,
        number=row.revision.number,
        digest=row.revision.digest,
        author=row.author,
        reason=row.reason,
        restores=row.restores,
        changed_at=row.created_at,
    )


def adapter_view(row: AdapterRow) -> AdapterView:
    """Needs what `AdapterRepository.named` loads."""
    return AdapterView(
        name=row.name,
        created_at=row.created_at,
        aliases=tuple(alias_view(alias, row.name, alias.current) for alias in row.aliases),
        revisions=tuple(revision_view(r, row, r.base) for r in row.revisions),
    )


def revision_entry(
    row: RevisionRow, source: AdapterSource, draft_head: DraftHeadSource | None
) -> RevisionEntry:
    """A revision as the resolver sees it. Needs its base loaded."""
    return RevisionEntry(
        number=row.number,
        state=cast(RevisionState, row.state),
        base_digest=row.base.digest,
        source=source,
        template_digest=row.template_digest,
        ships_tokenizer=row.ships_tokenizer,
        draft_head=draft_head,
    )
