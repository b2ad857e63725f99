"""Tokenizers that adapters ship: they cut texts as the base's does, or they are refused unread."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyloom.platform.generation.tokenizers import TextTokenizer, TokenizerUnusable

Change = Callable[[dict[str, Any]], None]


@pytest.fixture
def shipped(byte_level: TextTokenizer, tmp_path: Path) -> Callable[[str, Change], Path]:
    """The base's tokenizer with one of its files changed."""

    def make(file: str, change: Change) -> Path:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(byte_level.folder / name, tmp_path)
        content = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
        change(content)
        (tmp_path / file).write_text(json.dumps(content))
        return tmp_path

    return make


SLOW = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
HUGE = {"type": "Replace", "pattern": {"String": "Q"}, "content": "Q z" * 60_000}


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pre_tokenizer", SLOW),
        ("normalizer", HUGE),
        ("decoder", {"type": "Fuse"}),
    ],
)
def test_another_pipeline_is_refused(
    shipped: Callable[[str, Change], Path], byte_level: TextTokenizer, part: str, value: Any
) -> None:
    folder = shipped("tokenizer.json", lambda content: content.update({part: value}))
    with pytest.raises(TokenizerUnusable, match=part):
        TextTokenizer(folder, like=byte_level)


def test_another_vocabulary_is_refused(
    shipped: Callable[[str, Change], Path], byte_level: TextTokenizer
) -> None:
    folder = shipped("tokenizer.json", lambda content: content["model"]["merges"].pop())
    with pytest.raises(TokenizerUnusable, match="model"):
        TextTokenizer(folder, like=byte_level)


def test_what_a_training_set_is_not_applied(
    shipped: Callable[[str, Change], Path], byte_level: TextTokenizer
) -> None:
    padding = {
        "strategy": {"Fixed": 1_000_000_000},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    change = {"padding": padding, "truncation": truncation}
    folder = shipped("tokenizer.json", lambda content: content.update(change))
    tokenizer = TextTokenizer(folder, like=byte_level)
    text = "hello world and more"
    assert tokenizer.encode_now(text, special_tokens=False) == byte_level.encode_now(
        text, special_tokens=False
    )


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", {"tokenizer_class": 5}),
        ("tokenizer_config.json", {"eos_token": 5}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["a.B", None]}}),
        ("generation_config.json", {"eos_token_id": "two"}),
    ],
)
def test_a_config_that_nobody_can_read_is_a_tokenizer_fault(
    shipped: Callable[[str, Change], Path],
    byte_level: TextTokenizer,
    file: str,
    change: dict[str, Any],
) -> None:
    folder = shipped(file, lambda content: content.update(change))
    try:
        TextTokenizer(folder, like=byte_level)
    except TokenizerUnusable:
        return
    assert file == "tokenizer_config.json"  # what transformers shrugs off
