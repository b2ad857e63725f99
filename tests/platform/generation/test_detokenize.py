"""The deltas joined are the text, and no delta ends inside a character."""

from hypothesis import given, settings
from hypothesis import strategies as st

from polyloom.platform.generation.detokenize import IncrementalDetokenizer, decode
from polyloom.platform.generation.tokenizers import TextTokenizer

TEXTS = [
    "Grüße aus München: naïve café",
    "你好世界 🙂🙃",
    " leading",
    "a\ufffdb",
    "",
    "👩‍👩‍👧‍👦 family",
]


def backend_decode(tokenizer: TextTokenizer, ids: list[int]) -> str:
    return str(tokenizer.transformers.backend_tokenizer.decode(ids, skip_special_tokens=True))


def deltas_of(tokenizer: TextTokenizer, ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def test_texts_come_back_whole(byte_level: TextTokenizer) -> None:
    for text in TEXTS:
        ids = byte_level.encode_now(text, special_tokens=False)
        assert "".join(deltas_of(byte_level, ids)) == text


def test_a_character_of_many_tokens_comes_at_once(byte_level: TextTokenizer) -> None:
    ids = byte_level.encode_now("🤖", special_tokens=False)
    assert len(ids) > 1
    assert deltas_of(byte_level, ids) == [""] * (len(ids) - 1) + ["🤖", ""]


@settings(max_examples=300)
@given(data=st.data())
def test_random_ids_join_to_the_full_decode(byte_level: TextTokenizer, data: st.DataObject) -> None:
    """Random ids are mostly broken UTF-8: the hard case."""
    ids = data.draw(st.lists(st.integers(0, byte_level.vocabulary_size - 1), max_size=120))
    assert "".join(deltas_of(byte_level, ids)) == backend_decode(byte_level, ids)


@settings(max_examples=100)
@given(text=st.text(max_size=60))
def test_any_text_joins_to_itself(byte_level: TextTokenizer, text: str) -> None:
    ids = byte_level.encode_now(text, special_tokens=False)
    assert "".join(deltas_of(byte_level, ids)) == backend_decode(byte_level, ids)


@settings(max_examples=100)
@given(text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters="▁"), max_size=60))
def test_byte_fallback_joins_to_the_full_decode(byte_fallback: TextTokenizer, text: str) -> None:
    ids = byte_fallback.encode_now(text, special_tokens=False)
    assert "".join(deltas_of(byte_fallback, ids)) == backend_decode(byte_fallback, ids)


def test_special_tokens_are_no_text_and_break_nothing(byte_level: TextTokenizer) -> None:
    ids = byte_level.encode_now("né", special_tokens=False)
    special = min(byte_level.special_ids)
    with_specials = [x for i in ids for x in (special, i)]
    assert "".join(deltas_of(byte_level, with_specials)) == "né"


def test_pieces_drop_the_space_before_the_first_word_only(byte_fallback: TextTokenizer) -> None:
    backend = byte_fallback.transformers.backend_tokenizer
    ids = [backend.token_to_id(piece) for piece in ("▁hello", "▁world")]
    assert deltas_of(byte_fallback, ids) == ["hello", " world", ""]
    assert deltas_of(byte_fallback, ids[1:]) == ["world", ""]


def test_good_characters_beside_broken_bytes_stay(byte_fallback: TextTokenizer) -> None:
    backend = byte_fallback.transformers.backend_tokenizer
    good, broken = backend.token_to_id("é"), backend.token_to_id("<0xBC>")
    whole = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "ü".encode()]
    assert decode(byte_fallback, [good, *whole, broken, *whole]) == "éü\ufffdü"
