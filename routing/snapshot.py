"""All that a `model` string can mean, as one immutable, versioned value."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from polyloom.adapters.source import AdapterSource

EntryState = Literal["checking", "ready", "failed", "retired", "quarantined"]


class BaseEntry(msgspec.Struct, frozen=True):
    """A base that this server runs. `folder` holds its tokenizer and chat template."""

    name: str
    digest: str
    folder: str
    template_digest: str


class RevisionEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One revision of an adapter.

    template_digest: of the chat template in the revision's folder; None: it ships none.
    ships_tokenizer: the revision's folder holds its tokenizer.
    """

    number: int
    state: EntryState
    base_digest: str
    source: AdapterSource
    template_digest: str | None = None
    ships_tokenizer: bool = False


class AdapterEntry(msgspec.Struct, frozen=True):
    """A tenant's adapter: revisions by number, aliases as numbers."""

    name: str
    revisions: Mapping[int, RevisionEntry]
    aliases: Mapping[str, int]


class AdapterKey(msgspec.Struct, frozen=True):
    """An adapter's identity: names are unique within a tenant only."""

    tenant: str
    name: str


class RouteSnapshot(msgspec.Struct, frozen=True):
    """bases by name; adapters by (tenant, name). `version` grows with every change."""

    version: int
    bases: Mapping[str, BaseEntry] = MappingProxyType({})
    adapters: Mapping[AdapterKey, AdapterEntry] = MappingProxyType({})
