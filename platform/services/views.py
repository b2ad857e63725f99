"""What the services hand out: immutable values, detached from any database session."""

from datetime import datetime
from typing import Literal

import msgspec

from polyloom.adapters.draft_heads.config import TrainingRecord
from polyloom.adapters.source import AdapterSource

Scope = Literal[
    "inference", "adapters:read", "adapters:write", "routes:write", "usage:read", "admin"
]
RevisionState = Literal["checking", "ready", "failed", "retired", "quarantined"]
TenantState = Literal["active", "disabled"]


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant may use; None is unlimited.

    requests_per_minute, tokens_per_minute: over a sliding minute.  concurrent_requests: running or
    queued at once.  adapters: how many.  storage_bytes: of the blobs of live revisions.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    adapters: int | None = None
    storage_bytes: int | None = None


class TenantView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant. `slug` is its name everywhere outside the database.

    weight: its share of the engine against other tenants' while they wait for it.
    """

    id: int
    slug: str
    state: TenantState
    limits: TenantLimits
    created_at: datetime
    weight: float = 1.0


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it may be shown: its first characters, never the whole."""

    id: int
    prefix: str
    scopes: tuple[Scope, ...]
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class IssuedKey(msgspec.Struct, frozen=True, kw_only=True):
    """A new key. `key` is the secret itself: shown once, stored nowhere."""

    key: str
    view: KeyView


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent a request.

    The operator (the server's admin key) has scope `admin` and no tenant: tenant and key_id None.
    """

    scopes: frozenset[Scope]
    tenant: TenantView | None
    key_id: int | None

    @property
    def author(self) -> str:
        """The name under which changes of this principal are recorded."""
        return "operator" if self.key_id is None else f"key:{self.key_id}"


class BaseView(msgspec.Struct, frozen=True, kw_only=True):
    """A registered base: `name` is what clients send as `model`."""

    id: int
    name: str
    digest: str
    folder: str
    template_digest: str
    created_at: datetime


class RevisionContent(msgspec.Struct, frozen=True, kw_only=True):
    """A validated upload, ready to be recorded.

    digest: `sha256:<hex>` of the canonical content.  folder: staged folder on the blob store's file
    system, verified, moved (not copied) into the store when the content is new.
    template_digest: of the chat template shipped, None when the base's is used.
    ships_tokenizer: the folder holds a tokenizer of its own.
    """

    digest: str
    folder: str
    bytes: int
    rank: int
    targets: tuple[str, ...]
    template_digest: str | None = None
    ships_tokenizer: bool = False


class DraftHeadContent(msgspec.Struct, frozen=True, kw_only=True):
    """A validated draft head, ready to be recorded; digest, folder and bytes as of a revision.

    shared_digest, rank: of a delta.  drafts: tokens in a row.  training: its record, as JSON.
    """

    digest: str
    folder: str
    bytes: int
    shared_digest: str | None
    rank: int | None
    drafts: int
    training: str | None


class DraftHeadView(msgspec.Struct, frozen=True, kw_only=True):
    """A draft head. owner: `<adapter>@<number>`, or the base's name of a shared one.

    promoted: requests draft with it.  shared_digest: of the shared head that a delta is on.
    """

    owner: str
    number: int
    digest: str
    state: Literal["ready", "retired"]
    promoted: bool
    bytes: int
    rank: int | None
    drafts: int
    shared_digest: str | None
    training: TrainingRecord | None
    author: str
    created_at: datetime
    ended_at: datetime | None


class FidelityVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The check of a revision: engine against PEFT, then a probe generation.

    max_logprob_diff: largest absolute difference over the probe; None if it never got that far.
    failure: why it did not pass, for the uploader; None exactly when it passed.
    """

    max_logprob_diff: float | None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.failure is None


class RevisionView(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable upload. `base` is the name of the base it was made for.

    not_promoted: why the alias that was to move once it is ready did not.
    """

    id: int
    tenant: str
    adapter: str
    number: int
    digest: str
    state: RevisionState
    base: str
    base_digest: str
    bytes: int
    rank: int
    targets: tuple[str, ...]
    max_logprob_diff: float | None
    failure: str | None
    author: str
    created_at: datetime
    ended_at: datetime | None
    not_promoted: str | None = None

    @property
    def label(self) -> str:
        """`<adapter>@<number>`, as in `x-polyloom-revision`."""
        return f"{self.adapter}@{self.number}"


class BegunRevision(msgspec.Struct, frozen=True):
    """The answer to an upload; `created` is False when the content was there already."""

    revision: RevisionView
    created: bool


class CheckJob(msgspec.Struct, frozen=True):
    """A revision in state `checking`, claimed by this process for its check. `promote`: the alias to
    move when it is ready."""

    revision: RevisionView
    source: AdapterSource
    promote: str | None = None


class PromotionVerdict(msgspec.Struct, frozen=True):
    """Whether `alias` may move to a revision that is ready now; `refusal`: why not."""

    alias: str
    refusal: str | None = None


class AliasView(msgspec.Struct, frozen=True, kw_only=True):
    """Where an alias points now. `version` counts its changes from 1."""

    name: str
    adapter: str
    number: int
    digest: str
    version: int
    changed_at: datetime
    author: str


class AliasChangeView(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of an alias's history. `restores`: the version a rollback went back to."""

    version: int
    number: int
    digest: str
    author: str
    reason: str | None
    restores: int | None
    changed_at: datetime


class AdapterView(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's adapter with its aliases and revisions, newest revision first."""

    name: str
    created_at: datetime
    aliases: tuple[AliasView, ...]
    revisions: tuple[RevisionView, ...]


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished inference request. Times in seconds; `itl` is the mean gap between tokens.

    model: the string the client sent.  adapter/revision: None for the base.
    accepted_draft_tokens, rejected_draft_tokens: of what was drafted for it.
    """

    request_id: str
    tenant_id: int
    key_id: int | None
    endpoint: str
    model: str
    adapter: str | None
    revision: int | None
    adapter_digest: str | None
    fingerprint: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_draft_tokens: int = 0
    rejected_draft_tokens: int = 0
    queue_time: float
    ttft: float | None
    itl: float | None
    duration: float
    created_at: datetime


class UsageTotal(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the usage rows of one group; fields not grouped by are None."""

    tenant: str | None
    adapter: str | None
    revision: int | None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_draft_tokens: int
    rejected_draft_tokens: int
    mean_ttft: float | None
    mean_duration: float


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Who changed what. `before` and `after` are JSON texts of the changed thing, or None."""

    id: int
    tenant: str | None
    author: str
    action: str
    target: str
    before: str | None
    after: str | None
    created_at: datetime
