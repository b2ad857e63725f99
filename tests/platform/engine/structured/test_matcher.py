"""A sequence's place in its grammar: masks, looking ahead, coming back."""

import json
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from polyloom.platform.engine.errors import GrammarError
from polyloom.platform.engine.structured.source import check, llguidance_source
from polyloom.routing.grammar import Grammar, Vocabulary

TICKET = json.dumps(
    {
        "type": "object",
        "properties": {
            "category": {"enum": ["billing", "bug", "other"]},
            "urgent": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        },
        "required": ["category", "urgent", "tags"],
        "additionalProperties": False,
    }
)
REGEX = "(ab|cd)*[0-9]{2}"


def walk(matcher, choices) -> list[int]:
    """Tokens that the grammar allows, chosen by `choices`, until it ends or they do."""
    tokens: list[int] = []
    for choice in choices:
        if matcher.ended:
            break
        allowed = np.flatnonzero(matcher.allowed())
        tokens.append(int(allowed[choice % len(allowed)]))
        matcher.accept(tokens[-1])
    return tokens


choices = st.lists(st.integers(0, 511), max_size=40)
grammars = st.sampled_from([("json_schema", TICKET), ("regex", REGEX)])


@settings(max_examples=40)
@given(grammar=grammars, taken=choices, junk=st.lists(st.integers(0, 511), max_size=6))
def test_what_fits_is_what_the_masks_allow(matcher_of, grammar, taken, junk) -> None:
    matcher, replay = matcher_of(*grammar), matcher_of(*grammar)
    for token in walk(matcher, taken):
        replay.accept(token)
    fits = 0
    for token in junk:
        if replay.ended or not replay.allowed()[token]:
            break
        replay.accept(token)
        fits += 1
    assert matcher.fitting(junk) == fits


@settings(max_examples=40)
@given(grammar=grammars, taken=choices)
def test_forced_tokens_are_the_only_ones_allowed(matcher_of, grammar, taken) -> None:
    matcher = matcher_of(*grammar)
    walk(matcher, taken)
    forced = matcher.forced(64)
    assert matcher.forced(1) == forced[:1]
    assert matcher.fitting(forced) == len(forced)
    for token in forced:
        assert np.flatnonzero(matcher.allowed()).tolist() == [token]
        matcher.accept(token)


@settings(max_examples=40)
@given(grammar=grammars, taken=choices, junk=st.lists(st.integers(0, 511), max_size=6))
def test_asking_changes_nothing(matcher_of, grammar, taken, junk) -> None:
    matcher, replay = matcher_of(*grammar), matcher_of(*grammar)
    for token in walk(matcher, taken):
        matcher.fitting(junk)
        matcher.forced(9)
        replay.accept(token)
    matcher.fitting(junk)
    assert (matcher.allowed() == replay.allowed()).all()


def test_keys_are_forced_as_the_tokenizer_writes_them(matcher_of, tokenizer) -> None:
    matcher = matcher_of("json_schema", TICKET)
    forced = matcher.forced(64)
    written = tokenizer.encode('{"category": "')
    assert len(forced) > 1
    assert written[: len(forced)] == list(forced)


def test_the_end_allows_only_what_ends_a_text(matcher_of, tokenizer) -> None:
    matcher = matcher_of("regex", REGEX)
    for token in tokenizer.encode("ab1"):
        matcher.accept(token)
    assert not matcher.ended
    assert not matcher.allowed()[2]
    for token in tokenizer.encode("2"):
        matcher.accept(token)
    assert matcher.ended
    assert np.flatnonzero(matcher.allowed()).tolist() == [2]


def test_a_token_that_does_not_fit_is_an_error(matcher_of, tokenizer) -> None:
    matcher = matcher_of("regex", REGEX)
    with pytest.raises(GrammarError, match="doesn't satisfy"):
        matcher.accept(tokenizer.encode("z")[0])


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-ahead"),
        ("lark", "start: foo", "unknown name"),
        ("lark", "start: " + "(" * 9999 + '"a"' + ")" * 9999, "too deeply nested"),
        ("json_schema", "[]", "object schema"),
        ("json_schema", '{"not": {}}', "Unimplemented"),
        ("json_schema", json.dumps({"enum": ["x" * 9] * 99999}), "longer than 256 KiB"),
        ("json_schema", '{"items":' * 200 + "{}" + "}" * 200, "recursion limit"),
    ],
)
def test_bad_grammars_say_why(kind, text, said) -> None:
    with pytest.raises(GrammarError, match=said) as raised:
        check(kind, text)
    assert len(str(raised.value)) <= 500


def test_compiled_once_and_shared_by_sequences(compiler, make_grammar) -> None:
    first = compiler.compile(make_grammar("regex", "[xy]+z"))
    assert compiler.compile(make_grammar("regex", "[xy]+z")) is first
    one, other = first.result(30).matcher(), first.result(30).matcher()
    before = one.allowed()
    other.accept(int(np.flatnonzero(other.allowed())[0]))
    assert (one.allowed() == before).all()


def test_another_tokenizer_than_the_prompts_is_refused(compiler, make_grammar) -> None:
    grammar = make_grammar("regex", "a")
    vocabulary = type(grammar.vocabulary)(
        folder=grammar.vocabulary.folder, digest="sha256:other", eos_ids=(2,)
    )
    with pytest.raises(GrammarError, match="not the one"):
        compiler.compile(type(grammar)(kind="regex", text="a", vocabulary=vocabulary)).result(30)


def test_a_tokenizer_that_grammars_cannot_read_is_a_fault_of_the_request(
    compiler, tokenizer, tmp_path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": {"type": "Fuse"}}))
    digest = sha256(AutoTokenizer.from_pretrained(tmp_path).backend_tokenizer.to_str().encode())
    vocabulary = Vocabulary(
        folder=str(tmp_path), digest="sha256:" + digest.hexdigest(), eos_ids=(2,)
    )
    with pytest.raises(GrammarError, match="cannot be used with this tokenizer"):
        compiler.compile(Grammar(kind="regex", text="a", vocabulary=vocabulary)).result(30)


def test_json_is_written_on_one_line() -> None:
    source = json.loads(llguidance_source("json_schema", TICKET))
    options = source["grammars"][0]["json_schema"]["x-guidance"]
    assert (options["item_separator"], options["key_separator"]) == (", ", ": ")
