"""Text, ids and logprobs of a choice are cut alike."""

from polyloom.platform.engine.messages import TokenLogprob
from polyloom.platform.generation.detokenize import decode
from polyloom.platform.generation.output_text import OutputText, TextToken
from polyloom.platform.generation.tokenizers import TextTokenizer


def run(output: OutputText, ids: list[int]) -> tuple[str, list[TextToken]]:
    text, tokens = "", []
    for position, token_id in enumerate(ids):
        delta = output.push(token_id, TokenLogprob(token_id, -float(position)))
        text, tokens = text + delta.text, tokens + list(delta.tokens)
        if output.stopped is not None:
            return text, tokens
    delta = output.finish()
    return text + delta.text, tokens + list(delta.tokens)


def test_every_token_is_shown_once_with_its_offset(byte_level: TextTokenizer) -> None:
    ids = byte_level.encode_now("naïve 你好", special_tokens=False)
    text, tokens = run(OutputText(byte_level, ("never there",)), ids)
    assert text == "naïve 你好"
    assert [t.token_id for t in tokens] == ids
    assert [t.logprob.logprob for t in tokens if t.logprob] == [-float(i) for i in range(len(ids))]
    for token in tokens:
        own = byte_level.token_bytes(token.token_id).decode(errors="ignore")
        assert text[token.offset :].startswith(own)


def test_tokens_of_the_stop_string_are_not_shown(byte_level: TextTokenizer) -> None:
    ids = [byte_level.encode_now(c, special_tokens=False)[0] for c in "abXYcd"]
    output = OutputText(byte_level, ("XY",))
    text, tokens = run(output, ids)
    assert (text, output.stopped) == ("ab", "XY")
    assert [t.token_id for t in tokens] == ids[:2]
    assert output.tokens_seen == 4


def test_a_token_that_holds_text_and_stop_is_shown_cut(byte_level: TextTokenizer) -> None:
    token = next(
        i
        for i in range(byte_level.vocabulary_size)
        if len(decode(byte_level, [i])) >= 3 and decode(byte_level, [i]).isalpha()
    )
    whole = decode(byte_level, [token])
    output = OutputText(byte_level, (whole[1:],))
    text, tokens = run(output, [token])
    assert text == whole[0]
    assert [t.token_id for t in tokens] == [token]


def test_held_tokens_come_when_the_match_fails(byte_level: TextTokenizer) -> None:
    ids = [byte_level.encode_now(c, special_tokens=False)[0] for c in "aXb"]
    output = OutputText(byte_level, ("XY",))
    shown = [output.push(i) for i in ids]
    assert [d.text for d in shown] == ["a", "", "Xb"]
    assert [len(d.tokens) for d in shown] == [1, 0, 2]


def test_a_stop_string_counts_only_after_min_tokens(byte_level: TextTokenizer) -> None:
    ids = [byte_level.encode_now(c, special_tokens=False)[0] for c in "aXbXc"]
    output = OutputText(byte_level, ("X",), min_tokens=3)
    text, _ = run(output, ids)
    assert text == "aXb"
