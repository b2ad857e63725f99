"""Chat templates: rendered as transformers does, refused with a reason, told apart by digest."""

import pytest

from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.generation.tokenizers import TextTokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_renders_as_transformers(byte_level: TextTokenizer) -> None:
    expected = byte_level.transformers.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate(byte_level).render(MESSAGES) == expected


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system role here') }}", "no system role here"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages.pop() }}", "pop"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "chat template"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
    ],
)
def test_what_a_template_raises_is_the_client_s_to_read(
    byte_level: TextTokenizer, template: str, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        ChatTemplate(byte_level, template).render(MESSAGES)
    assert refused.value.param == "messages"


def test_a_model_without_a_template_says_so(byte_fallback: TextTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(byte_fallback).render(MESSAGES)


def test_the_digest_tells_templates_and_tokenizers_apart(
    byte_level: TextTokenizer, byte_fallback: TextTokenizer
) -> None:
    digests = {
        ChatTemplate(byte_level, "a").digest,
        ChatTemplate(byte_level, "b").digest,
        ChatTemplate(byte_fallback, "a").digest,
    }
    assert len(digests) == 3
    assert ChatTemplate(byte_level, "a").digest in digests
