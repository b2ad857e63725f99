"""From (tenant, `model`) to the combination that a request runs on, from the snapshot alone.

The whole string is looked up before it is split: route, then adapter, then base. Then the part
after the last `@` picks a revision (`3`, an alias, `sha256:<hex>`). A name that is no adapter may
still be `<base>:<adapter>`, and what is none of the tenant's own `<group>/<adapter or base>` of a
share group. Whatever does not resolve is an error: the base never answers in its place.
"""

from collections.abc import Iterator

import msgspec

from polyloom.adapters.source import AdapterSource, DraftHeadSource
from polyloom.routing.canary import choose
from polyloom.routing.combination import Combination
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.errors import (
    ModelNotFound,
    NoDefaultRevision,
    RevisionRetired,
    RoutingError,
)
from polyloom.routing.names import (
    DEFAULT_ALIAS,
    AliasRef,
    DigestRef,
    NumberRef,
    RevisionRef,
    parse_ref,
)
from polyloom.routing.request import CacheOwner
from polyloom.routing.snapshot import (
    AdapterEntry,
    AdapterKey,
    BaseEntry,
    MountKey,
    RevisionEntry,
    RouteEntry,
    RouteKey,
    RouteSnapshot,
    ShareGroupEntry,
)


class Resolution(msgspec.Struct, frozen=True, kw_only=True):
    """What a `model` string means at one version of the routes.

    combination, adapter, draft_head: as `GenerationRequest` takes them.  label: `<adapter>@<number>`, or the
    base's name; with `<group>/` before it if a share group brought it.  adapter_name, revision:
    None for the base.  owner: whose prefix cache it is.  route: `<name>@<version>` of the route
    that chose it, None without one.  drafts: as that route wants them.  route_version: of all
    routing state.
    tokenizer_folder, template_folder: where the tokenizer and the chat template lie (the revision's
    own if it ships them).
    """

    combination: Combination
    adapter: AdapterSource | None
    draft_head: DraftHeadSource | None = None
    label: str
    base_name: str
    adapter_name: str | None
    revision: int | None
    owner: CacheOwner
    route: str | None = None
    drafts: DraftPolicy | None = None
    route_version: int
    tokenizer_folder: str
    template_folder: str


def resolve(snapshot: RouteSnapshot, tenant: str, model: str, session: str = "") -> Resolution:
    """What `model` means to `tenant` (a slug).

    session: requests of one session get one target of a route, as long as its weights stand.
    Raises ModelNotFound (unknown, another tenant's, or not ready), NoDefaultRevision (an adapter
    without `prod`), RevisionRetired.
    """
    route = snapshot.routes.get(RouteKey(tenant, model))
    if route is None:
        return resolve_target(snapshot, tenant, model)
    target = choose(route.targets, tenant, route.name, session)
    return _through(snapshot, tenant, route, target.model)


def resolve_target(snapshot: RouteSnapshot, tenant: str, model: str) -> Resolution:
    """`resolve` for what a route may lead to: anything but a route. Raises what `resolve` does."""
    return _Lookup(snapshot, tenant, model).resolve()


def resolve_candidate(
    snapshot: RouteSnapshot, tenant: str, adapter: str, number: int
) -> Resolution:
    """A revision of the tenant's that may still be `checking`: what a gate tries before it is
    served. Raises ModelNotFound, RevisionRetired."""
    return _Lookup(snapshot, tenant, f"{adapter}@{number}").candidate(adapter, number)


def _through(snapshot: RouteSnapshot, tenant: str, route: RouteEntry, model: str) -> Resolution:
    try:
        found = resolve_target(snapshot, tenant, model)
    except RoutingError as error:
        raise type(error)(
            route.name, f"The route {route.name!r} leads to {model!r}: {error.message}"
        ) from error
    return msgspec.structs.replace(
        found, route=f"{route.name}@{route.version}", drafts=route.drafts
    )


class _Lookup:
    def __init__(self, snapshot: RouteSnapshot, tenant: str, model: str) -> None:
        self._snapshot = snapshot
        self._tenant = tenant
        self._model = model

    def resolve(self) -> Resolution:
        found = self._own() or self._shared()
        if found is None:
            raise self._unknown()
        return found

    def candidate(self, adapter: str, number: int) -> Resolution:
        entry = self._adapter(adapter)
        revision = None if entry is None else entry.revisions.get(number)
        if entry is None or revision is None:
            raise self._unknown()
        if revision.state == "checking":
            revision = msgspec.structs.replace(revision, state="ready")
        return self._revision(entry, revision)

    def _own(self) -> Resolution | None:
        if adapter := self._adapter(self._model):
            return self._default(adapter)
        if base := self._snapshot.bases.get(self._model):
            return self._base(base)
        name, at, suffix = self._model.rpartition("@")
        ref = parse_ref(suffix) if at else AliasRef(DEFAULT_ALIAS)
        if at and (adapter := self._adapter(name)):
            return self._revision(adapter, self._pick(adapter, ref))
        found = self._below_base(name if at else self._model)
        if found is None:
            return None
        adapter, base = found
        if not at:
            return self._default(adapter, base)
        return self._revision(adapter, self._pick(adapter, ref), base)

    def _adapter(self, name: str) -> AdapterEntry | None:
        return self._snapshot.adapters.get(AdapterKey(self._tenant, name))

    def _below_base(self, text: str) -> tuple[AdapterEntry, BaseEntry] | None:
        """`<base>:<adapter>`, where both names may hold colons themselves."""
        for base_name, name in _splits(text, ":"):
            base = self._snapshot.bases.get(base_name)
            adapter = self._adapter(name)
            if base and adapter:
                return adapter, base
        return None

    def _shared(self) -> Resolution | None:
        """`<mount>/<base>`, `<mount>/<adapter>` or that with the shared revision's number or digest
        after an `@`."""
        mount, _, rest = self._model.partition("/")
        group = self._snapshot.groups.get(MountKey(self._tenant, mount))
        if group is None:
            return None
        found = self._shared_base(group, rest) or self._shared_revision(group, rest)
        if found is None:
            return None
        prefix = f"{mount}/"
        return msgspec.structs.replace(
            found,
            label=prefix + found.label,
            adapter_name=None if found.adapter_name is None else prefix + found.adapter_name,
            owner=CacheOwner("group", group.uid),
        )

    def _shared_base(self, group: ShareGroupEntry, name: str) -> Resolution | None:
        base = self._snapshot.bases.get(name)
        return self._base(base) if base is not None and group.shares_base else None

    def _shared_revision(self, group: ShareGroupEntry, text: str) -> Resolution | None:
        name, at, suffix = text.rpartition("@") if "@" in text else (text, "", "")
        number = group.revisions.get(name)
        adapter = self._snapshot.adapters.get(AdapterKey(group.owner, name))
        if number is None or adapter is None:
            return None
        revision = adapter.revisions[number]
        ref = parse_ref(suffix) if at else NumberRef(number)
        match ref:
            case NumberRef(asked) if asked == number:
                return self._revision(adapter, revision)
            case DigestRef(digest) if revision.source.digest.startswith(digest):
                return self._revision(adapter, revision)
        return None

    def _default(self, adapter: AdapterEntry, base: BaseEntry | None = None) -> Resolution:
        if DEFAULT_ALIAS not in adapter.aliases:
            raise NoDefaultRevision(
                self._model,
                f"The adapter {adapter.name!r} has no alias {DEFAULT_ALIAS!r}: name a revision"
                f" ('{adapter.name}@<number>') or promote one",
            )
        return self._revision(adapter, self._pick(adapter, AliasRef(DEFAULT_ALIAS)), base)

    def _pick(self, adapter: AdapterEntry, ref: RevisionRef | None) -> RevisionEntry:
        match ref:
            case NumberRef(number):
                found = adapter.revisions.get(number)
            case AliasRef(alias):
                found = adapter.revisions.get(adapter.aliases.get(alias, 0))
            case DigestRef(prefix):
                found = self._by_digest(adapter, prefix)
            case None:
                found = None
        if found is None:
            raise self._unknown()
        return found

    def _by_digest(self, adapter: AdapterEntry, prefix: str) -> RevisionEntry | None:
        """Of several uploads of one content the ready one, else the newest."""
        matches = [r for r in adapter.revisions.values() if r.source.digest.startswith(prefix)]
        if len({r.source.digest for r in matches}) > 1:
            raise ModelNotFound(
                self._model, f"Several revisions' digests begin with {prefix!r}: give more digits"
            )
        return max(matches, key=lambda r: (r.state == "ready", r.number), default=None)

    def _revision(
        self, adapter: AdapterEntry, revision: RevisionEntry, named: BaseEntry | None = None
    ) -> Resolution:
        label = f"{adapter.name}@{revision.number}"
        if revision.state == "retired":
            raise RevisionRetired(self._model, f"The revision '{label}' was retired")
        if revision.state != "ready":
            raise ModelNotFound(
                self._model, f"The revision '{label}' is not ready: its state is {revision.state}"
            )
        base = self._base_of(revision)
        if base is None or named not in (None, base):
            raise ModelNotFound(self._model, f"The revision '{label}' was made for another base")
        ships_template = revision.template_digest is not None
        head = revision.draft_head or base.draft_head
        return Resolution(
            combination=Combination(
                base_digest=base.digest,
                template_digest=revision.template_digest or base.template_digest,
                adapter_digest=revision.source.digest,
                head_digest=None if head is None else head.digest,
            ),
            adapter=revision.source,
            draft_head=head,
            label=label,
            base_name=base.name,
            adapter_name=adapter.name,
            revision=revision.number,
            owner=CacheOwner("tenant", self._tenant),
            route_version=self._snapshot.version,
            tokenizer_folder=revision.source.path if revision.ships_tokenizer else base.folder,
            template_folder=revision.source.path if ships_template else base.folder,
        )

    def _base_of(self, revision: RevisionEntry) -> BaseEntry | None:
        bases = self._snapshot.bases.values()
        return next((b for b in bases if b.digest == revision.base_digest), None)

    def _base(self, base: BaseEntry) -> Resolution:
        head = base.draft_head
        return Resolution(
            combination=Combination(
                base_digest=base.digest,
                template_digest=base.template_digest,
                head_digest=None if head is None else head.digest,
            ),
            adapter=None,
            draft_head=head,
            label=base.name,
            base_name=base.name,
            adapter_name=None,
            revision=None,
            owner=CacheOwner("tenant", self._tenant),
            route_version=self._snapshot.version,
            tokenizer_folder=base.folder,
            template_folder=base.folder,
        )

    def _unknown(self) -> ModelNotFound:
        return ModelNotFound(self._model, f"The model {self._model!r} does not exist")


def _splits(text: str, separator: str) -> Iterator[tuple[str, str]]:
    """Every way to cut `text` in two at a `separator`, the longest left part first."""
    end = text.rfind(separator)
    while end > 0:
        yield text[:end], text[end + 1 :]
        end = text.rfind(separator, 0, end)
