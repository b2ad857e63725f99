"""Name resolution: every form of `model`, and never the base in place of something else."""

from types import MappingProxyType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyloom.adapters.source import AdapterSource
from polyloom.routing.errors import (
    ModelNotFound,
    NoDefaultRevision,
    RevisionRetired,
    RoutingError,
)
from polyloom.routing.names import is_alias, is_name, parse_ref
from polyloom.routing.request import CacheOwner
from polyloom.routing.resolver import resolve, resolve_candidate
from polyloom.routing.snapshot import (
    AdapterEntry,
    AdapterKey,
    BaseEntry,
    EntryState,
    MountKey,
    RevisionEntry,
    RouteEntry,
    RouteKey,
    RouteSnapshot,
    RouteTarget,
    ShareGroupEntry,
)

TINY = BaseEntry("tiny", "sha256:" + "b" * 64, "/bases/tiny", "sha256:template")
COLON = BaseEntry("org/tiny:v2", "sha256:" + "c" * 64, "/bases/colon", "sha256:template2")


def revision(
    number: int,
    state: EntryState = "ready",
    digest: str | None = None,
    base: BaseEntry = TINY,
    template: str | None = None,
    tokenizer: bool = False,
) -> RevisionEntry:
    hex_digest = digest or f"{number:08x}".ljust(64, "0")
    return RevisionEntry(
        number=number,
        state=state,
        base_digest=base.digest,
        source=AdapterSource("sha256:" + hex_digest, f"/blobs/{hex_digest}"),
        template_digest=template,
        ships_tokenizer=tokenizer,
    )


def adapter(name: str, *revisions: RevisionEntry, **aliases: int) -> AdapterEntry:
    return AdapterEntry(name, MappingProxyType({r.number: r for r in revisions}), aliases)


def snapshot(*adapters: AdapterEntry, tenant: str = "acme", version: int = 7) -> RouteSnapshot:
    return RouteSnapshot(
        version=version,
        bases={base.name: base for base in (TINY, COLON)},
        adapters={AdapterKey(tenant, entry.name): entry for entry in adapters},
    )


SUPPORT = adapter(
    "support", revision(1), revision(2), revision(3, "retired"), prod=2, canary=1, old=3
)


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("support", "support@2"),
        ("support@1", "support@1"),
        ("support@canary", "support@1"),
        ("support@prod", "support@2"),
        ("support@sha256:00000001", "support@1"),
        ("support@sha256:" + "00000002".ljust(64, "0"), "support@2"),
        ("tiny:support", "support@2"),
        ("tiny:support@1", "support@1"),
        ("tiny", "tiny"),
        ("org/tiny:v2", "org/tiny:v2"),
    ],
)
def test_every_form_of_a_name(model: str, label: str) -> None:
    found = resolve(snapshot(SUPPORT), "acme", model)
    assert (found.label, found.route_version) == (label, 7)


def test_a_revision_brings_its_digest_and_files() -> None:
    found = resolve(snapshot(SUPPORT), "acme", "support@1")
    assert found.adapter == SUPPORT.revisions[1].source
    assert found.combination.adapter_digest == found.adapter.digest
    assert found.combination.base_digest == TINY.digest
    assert found.combination.template_digest == TINY.template_digest
    assert (found.adapter_name, found.revision, found.base_name) == ("support", 1, "tiny")
    assert (found.tokenizer_folder, found.template_folder) == (TINY.folder, TINY.folder)


def test_the_base_has_no_adapter() -> None:
    found = resolve(snapshot(SUPPORT), "acme", "tiny")
    assert found.adapter is None and found.combination.adapter_digest is None
    assert (found.adapter_name, found.revision) == (None, None)


def test_a_shipped_tokenizer_and_template_belong_to_the_revision() -> None:
    entry = adapter("a", revision(1, template="sha256:own", tokenizer=True), revision(2), prod=1)
    found = resolve(snapshot(entry), "acme", "a")
    path = entry.revisions[1].source.path
    assert found.combination.template_digest == "sha256:own"
    assert (found.tokenizer_folder, found.template_folder) == (path, path)


@pytest.mark.parametrize(
    "model",
    [
        "",
        "@",
        "@1",
        "other",
        "support@",
        "support@9",
        "support@0",
        "support@01",
        "support@nope",
        "support@sha256:0000",
        "support@sha256:ffffffff",
        "support@SHA256:00000001",
        "support@1@2",
        "tiny@1",
        "tiny@prod",
        "tiny:",
        ":support",
        "tiny:other",
        "other:support",
        "org/tiny:v2:support",
        "SUPPORT",
        "support ",
    ],
)
def test_what_is_unknown_is_never_answered_by_the_base(model: str) -> None:
    with pytest.raises(ModelNotFound):
        resolve(snapshot(SUPPORT), "acme", model)


def test_without_prod_there_is_no_default() -> None:
    entry = adapter("a", revision(1), canary=1)
    for model in ("a", "tiny:a"):
        with pytest.raises(NoDefaultRevision, match="'a' has no alias 'prod'"):
            resolve(snapshot(entry), "acme", model)
    assert resolve(snapshot(entry), "acme", "a@canary").revision == 1


@pytest.mark.parametrize("model", ["support@3", "support@old", "support@sha256:00000003"])
def test_a_retired_revision_says_so(model: str) -> None:
    with pytest.raises(RevisionRetired, match="support@3"):
        resolve(snapshot(SUPPORT), "acme", model)


@pytest.mark.parametrize("state", ["checking", "failed", "quarantined"])
def test_what_is_not_ready_is_not_found(state: EntryState) -> None:
    entry = adapter("a", revision(1, state), prod=1)
    for model in ("a", "a@1", "a@prod", "tiny:a"):
        with pytest.raises(ModelNotFound, match=f"not ready: its state is {state}"):
            resolve(snapshot(entry), "acme", model)


def test_another_tenants_adapter_is_unknown() -> None:
    both = snapshot(SUPPORT)
    for model in ("support", "support@1", "tiny:support"):
        with pytest.raises(ModelNotFound, match="does not exist"):
            resolve(both, "globex", model)


def test_names_with_colons_are_looked_up_whole() -> None:
    whole = adapter("tiny:support", revision(9), prod=9)
    assert resolve(snapshot(SUPPORT, whole), "acme", "tiny:support").label == "tiny:support@9"
    assert resolve(snapshot(SUPPORT, whole), "acme", "tiny:support@9").revision == 9
    tuned = adapter("ft:tiny:org/x", revision(4), prod=4)
    assert resolve(snapshot(tuned), "acme", "ft:tiny:org/x").revision == 4
    below = adapter("x", revision(5, base=COLON), prod=5)
    assert resolve(snapshot(below), "acme", "org/tiny:v2:x").revision == 5


def test_an_adapter_comes_before_a_base_of_its_name() -> None:
    assert resolve(snapshot(adapter("tiny", revision(1), prod=1)), "acme", "tiny").revision == 1


def test_a_revision_of_another_base_is_not_served() -> None:
    elsewhere = BaseEntry("gone", "sha256:" + "d" * 64, "/gone", "t")
    entry = adapter("a", revision(1, base=elsewhere), revision(2, base=COLON), prod=1, two=2)
    for model in ("a", "a@1", "tiny:a@two"):
        with pytest.raises(ModelNotFound, match="another base"):
            resolve(snapshot(entry), "acme", model)
    assert resolve(snapshot(entry), "acme", "a@2").base_name == "org/tiny:v2"


def test_an_ambiguous_digest_asks_for_more() -> None:
    first, second = "abcdef01" + "0" * 56, "abcdef01" + "1" * 56
    entry = adapter("a", revision(1, digest=first), revision(2, digest=second))
    with pytest.raises(ModelNotFound, match="more digits"):
        resolve(snapshot(entry), "acme", "a@sha256:abcdef01")
    assert resolve(snapshot(entry), "acme", "a@sha256:abcdef011").revision == 2


def test_of_one_content_uploaded_again_the_ready_revision_is_meant() -> None:
    same = "abcdef01".ljust(64, "0")
    entry = adapter(
        "a", revision(1, "retired", same), revision(2, "ready", same), revision(3, "failed", same)
    )
    assert resolve(snapshot(entry), "acme", "a@sha256:abcdef01").revision == 2


def routed(*targets: tuple[str, int], name: str = "chat") -> RouteSnapshot:
    entry = RouteEntry(name, 4, tuple(RouteTarget(model, weight) for model, weight in targets))
    return msgspec.structs.replace(snapshot(SUPPORT), routes={RouteKey("acme", name): entry})


def test_a_route_leads_to_one_of_its_targets_and_says_so() -> None:
    routes = routed(("support@1", 1), ("support@prod", 1), ("tiny", 1), ("support@3", 0))
    seen = set()
    for session in map(str, range(60)):
        found = resolve(routes, "acme", "chat", session)
        assert (found.route, found.route_version) == ("chat@4", 7)
        assert resolve(routes, "acme", "chat", session) == found
        seen.add(found.label)
    assert seen == {"support@1", "support@2", "tiny"}
    assert resolve(routes, "acme", "support@1").route is None


def test_a_route_comes_first_and_its_targets_are_no_routes() -> None:
    routes = routed(("support@1", 1), name="support")
    assert resolve(routes, "acme", "support").label == "support@1"
    assert resolve(routed(("support", 1), name="support"), "acme", "support").label == "support@2"
    with pytest.raises(ModelNotFound):
        resolve(routes, "globex", "support")


@pytest.mark.parametrize(
    ("target", "kind"),
    [("support@3", RevisionRetired), ("other", ModelNotFound), ("chat", ModelNotFound)],
)
def test_a_share_that_leads_nowhere_is_an_error_and_never_the_base(
    target: str, kind: type[RoutingError]
) -> None:
    with pytest.raises(kind, match=f"'chat' leads to '{target}'") as caught:
        resolve(routed((target, 1)), "acme", "chat")
    assert caught.value.model == "chat"


def test_a_candidate_may_still_be_in_its_check() -> None:
    entry = adapter("a", revision(1, "checking"), revision(2, "retired"), revision(3, "failed"))
    found = resolve_candidate(snapshot(entry), "acme", "a", 1)
    assert (found.label, found.adapter) == ("a@1", entry.revisions[1].source)
    with pytest.raises(ModelNotFound, match="checking"):
        resolve(snapshot(entry), "acme", "a@1")
    for number in (2, 3, 4):
        with pytest.raises(RoutingError):
            resolve_candidate(snapshot(entry), "acme", "a", number)


def grouped(*own: AdapterEntry, shares_base: bool = True, shared: int = 1) -> RouteSnapshot:
    """globex calls acme's `support` through the group `team`; acme calls the group `out`."""
    group = ShareGroupEntry(
        uid="g1", owner="acme", revisions={"support": shared}, shares_base=shares_base
    )
    routes = snapshot(SUPPORT)
    return msgspec.structs.replace(
        routes,
        adapters={**routes.adapters, **{AdapterKey("globex", e.name): e for e in own}},
        groups={MountKey("globex", "team"): group, MountKey("acme", "out"): group},
    )


@pytest.mark.parametrize("suffix", ["", "@1", "@sha256:00000001"])
def test_a_member_calls_what_is_shared_in_the_group_s_cache(suffix: str) -> None:
    found = resolve(grouped(), "globex", f"team/support{suffix}")
    assert found.adapter == SUPPORT.revisions[1].source
    assert (found.label, found.adapter_name, found.revision) == (
        "team/support@1",
        "team/support",
        1,
    )
    assert found.owner == CacheOwner("group", "g1")
    assert resolve(grouped(), "acme", f"out/support{suffix}").owner == CacheOwner("group", "g1")


def test_what_is_called_directly_stays_in_the_tenant_s_own_cache() -> None:
    assert resolve(grouped(), "acme", "support@1").owner == CacheOwner("tenant", "acme")
    assert resolve(grouped(), "globex", "tiny").owner == CacheOwner("tenant", "globex")
    shared = resolve(grouped(), "globex", "team/tiny")
    assert (shared.label, shared.adapter) == ("team/tiny", None)
    assert shared.owner == CacheOwner("group", "g1")


@pytest.mark.parametrize(
    "model",
    [
        "support",
        "team/support@2",
        "team/support@prod",
        "team/other",
        "team",
        "team/",
        "out/support",
    ],
)
def test_nothing_but_the_shared_revision_can_be_called(model: str) -> None:
    with pytest.raises(ModelNotFound, match="does not exist"):
        resolve(grouped(), "globex", model)


def test_a_base_is_shared_only_where_the_group_says_so() -> None:
    with pytest.raises(ModelNotFound):
        resolve(grouped(shares_base=False), "globex", "team/tiny")


def test_a_tenant_s_own_name_wins_over_a_group_s() -> None:
    own = adapter("team/support", revision(9), prod=9)
    found = resolve(grouped(own), "globex", "team/support")
    assert (found.revision, found.owner) == (9, CacheOwner("tenant", "globex"))
    assert resolve(grouped(own), "globex", "team/support@9").revision == 9


def test_a_shared_revision_that_is_retired_says_so() -> None:
    with pytest.raises(RevisionRetired):
        resolve(grouped(shared=3), "globex", "team/support")


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,20}", fullmatch=True)
entries = st.builds(
    lambda name, states, prod: adapter(
        name,
        *(revision(i + 1, state) for i, state in enumerate(states)),
        **({"prod": prod} if prod and prod <= len(states) else {}),
    ),
    names,
    st.lists(
        st.sampled_from(["checking", "ready", "failed", "retired", "quarantined"]), max_size=4
    ),
    st.integers(0, 4),
)


@given(st.lists(entries, max_size=4, unique_by=lambda e: e.name), st.text(max_size=40), st.data())
def test_whatever_is_asked_is_exactly_what_is_served(
    adapters: list[AdapterEntry], noise: str, data: st.DataObject
) -> None:
    routes = snapshot(*adapters)
    forms = [noise, "tiny"]
    for entry in adapters:
        forms += [entry.name, f"tiny:{entry.name}", f"{entry.name}@prod", f"{entry.name}{noise}"]
        forms += [f"{entry.name}@{number}" for number in range(6)]
    model = data.draw(st.sampled_from(forms))
    try:
        found = resolve(routes, "acme", model)
    except RoutingError as error:
        assert error.model == model
        return
    if found.adapter is None:
        assert model == found.base_name
        return
    entry = routes.adapters[AdapterKey("acme", found.adapter_name or "")]
    served = entry.revisions[found.revision or 0]
    assert served.state == "ready" and served.source == found.adapter
    name, at, suffix = model.rpartition("@")
    expected = int(suffix) if suffix.isdigit() else entry.aliases["prod"]
    assert found.revision == expected
    assert model == entry.name or (at and name.endswith(entry.name)) or model.endswith(entry.name)


@given(st.text(max_size=140))
def test_names_and_references_never_overlap(text: str) -> None:
    if is_alias(text):
        assert is_name(text) and "@" not in text and not text.isdigit()
    if (ref := parse_ref(text)) is not None:
        assert "@" not in text and ref == parse_ref(text)
