"""Distinct namespaces and distinct chains never have a hash in common."""

from dataclasses import astuple, fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from polyloom.kvcache.namespace import Namespace, block_hashes

DIGESTS = ("sha256:aa", "sha256:bb", "", "a", "aa", "None", "tenant", "group", "sn", "s\x00")
texts = st.one_of(st.sampled_from(DIGESTS), st.text(max_size=4))
optional = st.one_of(st.none(), texts)
namespaces = st.builds(
    Namespace,
    owner_kind=st.sampled_from(("tenant", "group")),
    owner_name=texts,
    base_digest=texts,
    adapter_digest=optional,
    tokenizer_digest=texts,
    template_digest=texts,
    tool_schema_digest=optional,
    salt=optional,
    kv_dtype=texts,
)
PLAIN = Namespace(
    owner_kind="tenant",
    owner_name="acme",
    base_digest="sha256:base",
    adapter_digest="sha256:adapter",
    tokenizer_digest="sha256:tokenizer",
    template_digest="sha256:template",
    tool_schema_digest="sha256:tools",
    salt="salt",
    kv_dtype="bfloat16",
)


@settings(max_examples=500)
@given(namespaces, namespaces)
def test_roots_are_equal_exactly_where_all_fields_are(a: Namespace, b: Namespace) -> None:
    assert (a.root() == b.root()) == (astuple(a) == astuple(b))


@settings(max_examples=200)
@given(namespaces, st.sampled_from([f.name for f in fields(Namespace)]), optional)
def test_a_change_of_any_one_field_is_another_root(
    namespace: Namespace, name: str, value: str | None
) -> None:
    other = replace(namespace, **{name: value})
    assert (other.root() == namespace.root()) == (other == namespace)


def test_neighbours_that_have_collided_elsewhere_do_not() -> None:
    alike = [
        PLAIN,
        replace(PLAIN, adapter_digest=None),
        replace(PLAIN, adapter_digest=""),
        replace(PLAIN, salt=None),
        replace(PLAIN, salt=""),
        replace(PLAIN, salt=PLAIN.adapter_digest, adapter_digest=None),
        replace(PLAIN, salt=None, tool_schema_digest="salt"),
        replace(PLAIN, owner_kind="group"),
        replace(PLAIN, owner_name="acmesha256:", base_digest="base"),
        replace(PLAIN, owner_name="acme\x00", base_digest="sha256:base"),
        replace(PLAIN, template_digest="sha256:tokenizer", tokenizer_digest="sha256:template"),
        replace(PLAIN, kv_dtype="float32"),
    ]
    assert len({namespace.root() for namespace in alike}) == len(alike)


chains = st.tuples(
    st.sampled_from((b"a" * 32, b"b" * 32)),
    st.sampled_from((1, 2, 4)),
    st.lists(st.integers(0, 2**32 - 1), max_size=8),
)


@settings(max_examples=300)
@given(chains, chains)
def test_a_hash_stands_for_its_root_its_block_size_and_all_tokens_before(a, b) -> None:
    meaning = {}
    for root, size, tokens in (a, b):
        for index, block_hash in enumerate(block_hashes(root, tokens, size)):
            stands_for = (root, size, tuple(tokens[: (index + 1) * size]))
            assert meaning.setdefault(block_hash, stands_for) == stands_for
    assert len(block_hashes(*a[:1], a[2], a[1])) == len(a[2]) // a[1]


def test_the_format_is_fixed() -> None:
    """Hashes are compared between processes and written to reports."""
    assert PLAIN.root().hex().startswith("dc3a764dc42c1d0f")
    assert block_hashes(b"\x00" * 32, range(16), 16)[0].hex().startswith("e4bdde657377ec33")
