"""Chat templates: rendered as transformers does, refused with a reason, told apart by digest."""

from collections.abc import AsyncIterator

import pytest

from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.template_workers import TemplateWorkers
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.generation.tokenizers import TextTokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(params=["the operator's", "a tenant's"])
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[TemplateWorkers | None]:
    """Who renders: this process or a worker. Clients cannot tell the two apart."""
    workers = TemplateWorkers()
    yield None if request.param == "the operator's" else workers
    await workers.close()


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ bos_token }}{{ eos_token }}{{ pad_token }}|{{ tools }}|{{ documents }}",
        "{% for m in messages %}\n {% if loop.last %}\n{{ m | tojson }}{% endif %}\n{% endfor %}\r\n",
        "{% generation %}{{ messages[1].content | trim }}{% endgeneration %}\n",
        "{{ messages }}{{ messages[-1].thinking }}{{ add_generation_prompt }}",
    ],
)
async def test_renders_as_transformers(
    byte_level: TextTokenizer, workers: TemplateWorkers | None, template: str | None
) -> None:
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": " Grüß dich, 世界 🙂 <|im_end|>\x00\n", "name": "Ann"},
    ]
    expected = byte_level.transformers.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, chat_template=template
    )
    assert await ChatTemplate(byte_level, template, workers).render(messages, "t") == expected


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system role here') }}", "refused: no system role here"),
        ("{{ messages[0].nothing.more }}", "nothing"),
        ("{{ messages.pop() }}", "pop"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for %}", "chat template"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ 1" + "0" * 5000 + " }}", "chat template failed: ValueError"),
        ("{{ raise_exception('\\ud800' ~ 'x' * 10000) }}", r"refused: \\ud800x{472}$"),
    ],
)
async def test_what_a_template_raises_is_the_client_s_to_read(
    byte_level: TextTokenizer, workers: TemplateWorkers | None, template: str, said: str
) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        await ChatTemplate(byte_level, template, workers).render(MESSAGES, "t")
    assert refused.value.param == "messages"


async def test_a_model_without_a_template_says_so(byte_fallback: TextTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        await ChatTemplate(byte_fallback).render(MESSAGES, "t")


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
