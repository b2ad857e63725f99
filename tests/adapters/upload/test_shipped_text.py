"""A tokenizer or template shipped with an adapter is usable, or refused naming its file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from polyloom.adapters.errors import InvalidAdapterError
from polyloom.adapters.shipped_text import check_shipped_text

VOCABULARY = 40
TEMPLATE = "{% for m in messages %}{{ m.content }}{% generation %}{% endgeneration %}{% endfor %}"


@pytest.fixture
def write_tokenizer(tmp_path: Path) -> Callable[[int], Path]:
    def write(size: int) -> Path:
        vocabulary = {f"t{i}": i for i in range(size)}
        Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(
            str(tmp_path / "tokenizer.json")
        )
        return tmp_path

    return write


def refused(folder: Path, file: str, match: str | None = None) -> None:
    with pytest.raises(InvalidAdapterError, match=match) as caught:
        check_shipped_text(folder, VOCABULARY)
    assert caught.value.param == file


def test_nothing_shipped(tmp_path: Path) -> None:
    shipped = check_shipped_text(tmp_path, VOCABULARY)
    assert not shipped.has_tokenizer and not shipped.has_template


def test_the_bases_own_tokenizer(write_tokenizer: Callable[[int], Path]) -> None:
    folder = write_tokenizer(VOCABULARY)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "special_tokens_map.json").write_text("{}")
    shipped = check_shipped_text(folder, VOCABULARY)
    assert shipped.has_tokenizer and shipped.has_template


def test_added_tokens(write_tokenizer: Callable[[int], Path]) -> None:
    folder = write_tokenizer(VOCABULARY + 2)
    refused(folder, "tokenizer.json", "'t40', 't41'")
    write_tokenizer(VOCABULARY)
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": VOCABULARY}))
    refused(folder, "added_tokens.json", "<tool>")
    (folder / "added_tokens.json").unlink()
    added = {"added_tokens_decoder": {"3": {"content": "a"}, "77": {"content": "<b>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(added))
    refused(folder, "tokenizer_config.json", "77")


@pytest.mark.parametrize("file", ["tokenizer.model", "vocab.json", "merges.txt"])
def test_a_slow_tokenizer_alone(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text("{}")
    refused(tmp_path, file, "tokenizer.json")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "\x00"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}'),
        ("added_tokens.json", '{"a": "x"}'),
        ("special_tokens_map.json", "nonsense"),
        ("chat_template.jinja", "{{ unclosed"),
        ("chat_template_tools.jinja", "{% endfor %}"),
        ("chat_template.jinja", "{% include 'x' %}{% nonsense %}"),
        ("chat_template.jinja", "{{" + "(" * 100_000),
        ("chat_template.jinja", "{{ 1" + "0" * 5_000 + " }}"),
    ],
)
def test_what_cannot_be_used(tmp_path: Path, file: str, content: Any) -> None:
    (tmp_path / file).write_text(content)
    refused(tmp_path, file)


def test_a_template_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    refused(tmp_path, "chat_template.jinja", "UTF-8")


def test_checking_a_template_computes_nothing_of_it(tmp_path: Path) -> None:
    """Compiling would fold this constant: 80 GB of it."""
    (tmp_path / "chat_template.jinja").write_text("{{ 'x' * 8 * 10 ** 10 }}{{ 7 ** (10 ** 9) }}")
    assert check_shipped_text(tmp_path, VOCABULARY).has_template


def test_templates_are_small(tmp_path: Path) -> None:
    for letter in "ab":
        (tmp_path / f"chat_template_{letter}.jinja").write_text("é" * (1 << 16))
    assert check_shipped_text(tmp_path, VOCABULARY).has_template
    (tmp_path / "chat_template_c.jinja").write_text("c")
    refused(tmp_path, "chat_template_c.jinja", "over 262144 bytes")


@pytest.mark.parametrize("inline", [TEMPLATE, [{"name": "default", "template": TEMPLATE}]])
def test_templates_inline_and_as_files(tmp_path: Path, inline: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline}))
    assert check_shipped_text(tmp_path, VOCABULARY).has_template
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert check_shipped_text(tmp_path, VOCABULARY).has_template
