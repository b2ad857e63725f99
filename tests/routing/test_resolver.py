"""Name resolution: every form of `model`, and never the base in place of something else."""

from types import MappingProxyType

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
from polyloom.routing.resolver import resolve
from polyloom.routing.snapshot import (
    AdapterEntry,
    AdapterKey,
    BaseEntry,
    EntryState,
    RevisionEntry,
    RouteSnapshot,
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
