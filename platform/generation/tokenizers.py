"""Tokenizers by folder: text to ids and ids to text, and the bytes of single tokens."""

import asyncio
import hashlib
from functools import lru_cache
from pathlib import Path

import msgspec
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from polyloom.platform.errors import ContextLengthExceeded

ENCODE_INLINE_CHARACTERS = 8192
"""Longer texts are encoded in a thread: 8,192 characters take about a millisecond."""

PIPELINE = ("normalizer", "pre_tokenizer", "model", "decoder")
"""Of `tokenizer.json`: how a text is cut up and put together again."""

MAX_POST_PROCESSOR_CHARACTERS = 4096
"""What is added around a prompt, such as a BOS token, in tokenizer.json's words."""

_SAMPLE = "Hello, wörld!\n  x = [1, 2] # 你好 🙂 don't"

MAX_CHARACTERS_PER_TOKEN = 64
"""A text longer than this many characters for each token of the context cannot fit it."""


class TokenizerUnusable(Exception):
    """A folder without a tokenizer that the server can run; the message names the folder's fault."""


class TextTokenizer:
    """The tokenizer of one base or revision.

    eos_ids: every id that ends a sequence, from the tokenizer and `generation_config.json`.
    special_ids: ids that are no text, skipped when text is built.
    strips_leading_space: decoding drops the space that encoding put before the first word.
    """

    def __init__(self, folder: Path, like: "TextTokenizer | None" = None) -> None:
        """like: the base's, for a tokenizer that an adapter ships: it must cut texts as that does,
        by whatever special tokens. Nothing of a stranger's is run before that is known: a regex
        may take for ever, and a replacement may make a gigabyte of a word.

        Raises TokenizerUnusable.
        """
        tokenizer = _load(folder)
        self.folder = folder
        self.transformers = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_padding()  # both are a training's, not the text's
        self._backend.no_truncation()
        if like is not None:
            self._check_like(like)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(tokenizer.all_special_ids).union(
            token_id for token_id, token in added.items() if token.special
        )
        self.eos_ids = _eos_ids(folder, tokenizer.eos_token_id)
        self.bos_id: int | None = tokenizer.bos_token_id
        self.vocabulary_size = len(tokenizer)
        self._byte_level = "ByteLevel" in repr(self._backend.decoder)
        self.strips_leading_space = not self._byte_level and self._decodes_without_space()
        self._bytes: dict[int, bytes] = {}
        self._check_bytes()
        self.digest = "sha256:" + hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    async def encode(
        self, text: str, *, special_tokens: bool, max_tokens: int, param: str
    ) -> list[int]:
        """Ids of `text`; special tokens (BOS) are added as the tokenizer's own post-processor does.

        A text that cannot fit `max_tokens` even at 64 characters a token is refused unread.
        """
        if len(text) > max_tokens * MAX_CHARACTERS_PER_TOKEN:
            raise ContextLengthExceeded(
                f"a prompt of {len(text)} characters cannot fit {max_tokens} tokens", param=param
            )
        if len(text) <= ENCODE_INLINE_CHARACTERS:
            return self.encode_now(text, special_tokens=special_tokens)
        return await asyncio.to_thread(self.encode_now, text, special_tokens=special_tokens)

    def encode_now(self, text: str, *, special_tokens: bool) -> list[int]:
        """`encode` in the calling thread, for short texts."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def token_text(self, token_id: int) -> str:
        """One token as OpenAI's logprobs show it: special tokens by their name, a part of a
        character as `bytes:\\xe4\\xbd`, so that no two of them look alike."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that one token stands for, also when they are part of a character."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._raw_token_bytes(token_id)
        return known

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written like this; None if there is none."""
        token_id: int | None = self._backend.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def _check_like(self, base: "TextTokenizer") -> None:
        own, theirs = (msgspec.json.decode(t._backend.to_str()) for t in (self, base))
        for part in PIPELINE:
            if own[part] != theirs[part]:
                raise TokenizerUnusable(f"its {part} is not the base's")
        if len(msgspec.json.encode(own["post_processor"])) > MAX_POST_PROCESSOR_CHARACTERS:
            raise TokenizerUnusable("its post_processor is too long")

    def _decodes_without_space(self) -> bool:
        ids = self.encode_now("a", special_tokens=False)
        text: str = self._backend.decode(ids)
        return not text.startswith(" ")

    def _check_bytes(self) -> None:
        """The bytes of single tokens are the text: hold them to the tokenizer's own decoder once."""
        ids = self.encode_now(_SAMPLE, special_tokens=False)
        text = b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
        if self.strips_leading_space:
            text = text.removeprefix(" ")
        if text != self._backend.decode(ids, skip_special_tokens=True):
            raise TokenizerUnusable("its decoder is neither byte-level nor pieces with bytes")

    def _raw_token_bytes(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self.special_ids:
            return token.encode()
        if self._byte_level:
            return _byte_level_bytes(token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()


def _load(folder: Path) -> PreTrainedTokenizerFast:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, use_fast=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers meets in a folder
        raise TokenizerUnusable(f"no usable tokenizer: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise TokenizerUnusable("only tokenizers with a tokenizer.json are supported")
    return tokenizer


@lru_cache(maxsize=1)
def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: the inverse of its `bytes_to_unicode`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


def _byte_level_bytes(token: str) -> bytes:
    table = _byte_of_character()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _eos_ids(folder: Path, tokenizer_eos: int | None) -> tuple[int, ...]:
    ids = set() if tokenizer_eos is None else {int(tokenizer_eos)}
    config = folder / "generation_config.json"
    if config.is_file():
        try:
            declared = msgspec.json.decode(config.read_bytes(), type=_GenerationConfig).eos_token_id
        except msgspec.DecodeError as error:
            raise TokenizerUnusable(f"generation_config.json: {error}") from error
        ids.update([declared] if isinstance(declared, int) else declared or [])
    return tuple(sorted(ids))


class TokenizerCache:
    """Loaded tokenizers by folder. Folders are content-addressed, so entries never go stale."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._loading: dict[Path, asyncio.Task[TextTokenizer]] = {}

    async def get(self, folder: Path) -> TextTokenizer:
        """The tokenizer in `folder`, loaded once in a thread. Raises TokenizerUnusable."""
        task = self._loading.pop(folder, None)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(TextTokenizer, folder))
        self._loading[folder] = task  # last used is last
        while len(self._loading) > self._capacity:
            self._loading.pop(next(iter(self._loading)))
        try:
            return await asyncio.shield(task)
        except Exception:
            self._loading.pop(folder, None)
            raise
