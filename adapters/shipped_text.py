"""Tokenizer and chat template that an adapter ships: parsed here, so that serving cannot fail."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

from polyloom.adapters.artifact import TEMPLATE_FILES, TOKENIZER_FILES
from polyloom.adapters.errors import InvalidAdapterError

_TOKENIZER = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE_BYTES = 256 << 10
"""Of all templates together; the longest in use have some 30 KiB. Bounds the parsing to seconds."""
_VOCABULARIES = ("tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")


@dataclass(frozen=True)
class ShippedText:
    """What of it a folder ships."""

    has_tokenizer: bool
    has_template: bool


def check_shipped_text(folder: Path, vocab_size: int) -> ShippedText:
    """Parse the shipped tokenizer and templates.

    vocab_size: rows of the base's embedding; a token beyond them is an added token, which this
    base cannot embed. Raises InvalidAdapterError naming the file.
    """
    names = {p.name for p in folder.iterdir()}
    has_tokenizer = _TOKENIZER in names
    if has_tokenizer:
        _check_tokenizer(folder / _TOKENIZER, vocab_size)
    elif lone := sorted(names.intersection(_VOCABULARIES)):
        message = "is shipped without tokenizer.json; save the fast tokenizer, or leave it out"
        raise InvalidAdapterError(lone[0], message)
    for name in sorted(names & TOKENIZER_FILES):
        if name.endswith(".json") and name != _TOKENIZER:
            _check_token_ids(folder / name, vocab_size)
    templates = list(_templates(folder, names))
    size = 0
    for file, template in templates:
        size += len(template.encode(errors="surrogatepass"))
        if size > _TEMPLATE_BYTES:
            raise InvalidAdapterError(file, f"takes the templates over {_TEMPLATE_BYTES} bytes")
        _check_template(file, template)
    return ShippedText(has_tokenizer, bool(templates))


def _check_tokenizer(path: Path, vocab_size: int) -> None:
    try:
        vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises bare Exception for a file it cannot read
        raise InvalidAdapterError(path.name, f"is not a tokenizer: {error}") from error
    _refuse_added(path.name, vocabulary, vocab_size)


def _check_token_ids(path: Path, vocab_size: int) -> None:
    """Added tokens are also named in the JSON files beside the tokenizer."""
    content = _read_object(path)
    decoder = content.get("added_tokens_decoder")
    if path.name == "added_tokens.json":
        ids = {token: _as_id(path, index) for token, index in content.items()}
    elif isinstance(decoder, dict):
        ids = {f"{index}: {token}": _as_id(path, index) for index, token in decoder.items()}
    else:
        return
    _refuse_added(path.name, ids, vocab_size)


def _as_id(path: Path, value: object) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise InvalidAdapterError(path.name, f"has a token id {value!r}") from None


def _refuse_added(file: str, vocabulary: dict[str, int], vocab_size: int) -> None:
    added = [token for token, index in vocabulary.items() if index >= vocab_size]
    if added:
        shown = ", ".join(repr(t) for t in sorted(added)[:5])
        message = f"adds tokens that the base of {vocab_size} cannot embed: {shown}"
        raise InvalidAdapterError(file, message)


def _templates(folder: Path, names: set[str]) -> Iterator[tuple[str, str]]:
    for name in sorted(names):
        if TEMPLATE_FILES.fullmatch(name):
            try:
                yield name, (folder / name).read_text(encoding="utf-8")
            except UnicodeDecodeError:
                raise InvalidAdapterError(name, "is not UTF-8 text") from None
    if _TOKENIZER_CONFIG not in names:
        return
    inline = _read_object(folder / _TOKENIZER_CONFIG).get("chat_template")
    if isinstance(inline, str):
        yield _TOKENIZER_CONFIG, inline
    elif isinstance(inline, list):
        for named in inline:
            if not (isinstance(named, dict) and isinstance(named.get("template"), str)):
                raise InvalidAdapterError(_TOKENIZER_CONFIG, "has a chat_template without a text")
            yield _TOKENIZER_CONFIG, named["template"]
    elif inline is not None:
        raise InvalidAdapterError(_TOKENIZER_CONFIG, "has a chat_template that is not a text")


def _read_object(path: Path) -> dict[str, object]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidAdapterError(path.name, f"is not a JSON object: {error}") from error


def _check_template(file: str, template: str) -> None:
    """Parse it as far as that is safe with a hostile text: compiling would fold its constants."""
    # transformers' own sandbox with its extensions: what renders it when it is served.
    sandbox = _compile_jinja_template("").environment
    try:
        sandbox.parse(template)
    except Exception as error:  # also ValueError, of a number with thousands of digits
        raise InvalidAdapterError(file, f"is no chat template: {error}") from error
