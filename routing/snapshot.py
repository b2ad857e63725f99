"""All that a `model` string can mean, as one immutable, versioned value."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from polyloom.adapters.source import AdapterSource, DraftHeadSource
from polyloom.routing.drafts import DraftPolicy

EntryState = Literal["checking", "ready", "failed", "retired", "quarantined"]


class BaseEntry(msgspec.Struct, frozen=True):
    """A base that this server runs. `folder` holds its tokenizer and chat template.

    draft_head: the shared one that is promoted.
    """

    name: str
    digest: str
    folder: str
    template_digest: str
    draft_head: DraftHeadSource | None = None


class RevisionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of an adapter.

    template_digest: of the chat template in the revision's folder; None: it ships none.
    ships_tokenizer: the revision's folder holds its tokenizer.
    draft_head: its own that is promoted; None: the base's is used.
    """

    number: int
    state: EntryState
    base_digest: str
    source: AdapterSource
    template_digest: str | None = None
    ships_tokenizer: bool = False
    draft_head: DraftHeadSource | None = None


class AdapterEntry(msgspec.Struct, frozen=True):
    """A tenant's adapter: revisions by number, aliases as numbers."""

    name: str
    revisions: Mapping[int, RevisionEntry]
    aliases: Mapping[str, int]


class AdapterKey(msgspec.Struct, frozen=True):
    """An adapter's identity: names are unique within a tenant only."""

    tenant: str
    name: str


class RouteKey(msgspec.Struct, frozen=True):
    """A route's identity: names are unique within a tenant only."""

    tenant: str
    name: str


class RouteTarget(msgspec.Struct, frozen=True):
    """Where a share of a route's conversations goes: a `model` string that names no route, and its
    weight among the route's targets, 0 for none."""

    model: str
    weight: int


class RouteEntry(msgspec.Struct, frozen=True):
    """A route at its newest `version`; its targets have a positive weight together.

    drafts: how tokens are drafted for its requests that do not say; None for the server's way.
    """

    name: str
    version: int
    targets: tuple[RouteTarget, ...]
    drafts: DraftPolicy | None = None


class MountKey(msgspec.Struct, frozen=True):
    """A share group as one of its members names it: `mount` is unique within the tenant."""

    tenant: str
    mount: str


class ShareGroupEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What the members of a group may call beside their own.

    uid: names the group's prefix cache.  owner: the tenant (a slug) whose adapters these are.
    revisions: the one shared revision of each shared adapter.  shares_base: bases may be called
    through the group, which puts their prompts into its cache.
    """

    uid: str
    owner: str
    revisions: Mapping[str, int]
    shares_base: bool


class RouteSnapshot(msgspec.Struct, frozen=True):
    """Bases by name, adapters and routes by (tenant, name), share groups by (member, mount).
    `version` grows with every change."""

    version: int
    bases: Mapping[str, BaseEntry] = MappingProxyType({})
    adapters: Mapping[AdapterKey, AdapterEntry] = MappingProxyType({})
    routes: Mapping[RouteKey, RouteEntry] = MappingProxyType({})
    groups: Mapping[MountKey, ShareGroupEntry] = MappingProxyType({})
