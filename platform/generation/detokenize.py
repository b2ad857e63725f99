"""Token ids to text, a token at a time, never splitting a character."""

import codecs
from collections.abc import Iterable

from polyloom.platform.generation.tokenizers import TextTokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Decodes one sequence through the bytes of its tokens. The deltas joined are its text.

    Bytes that can still become a character are held back; bytes that cannot are U+FFFD, one for
    each maximal part, as in every UTF-8 decoder of today. Special tokens are no text, but for those
    in `shown`.
    """

    def __init__(self, tokenizer: TextTokenizer, shown: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown
        self._decoder = _Utf8Decoder(errors="replace")
        self._strip_space = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; empty while a character is incomplete."""
        if token_id in self._hidden:
            return ""
        return self._stripped(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """What is left when the sequence ends: an incomplete character, as U+FFFD."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        """The space that some tokenizers put before the first word is not part of the text."""
        if self._strip_space and text:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


def decode(tokenizer: TextTokenizer, ids: Iterable[int]) -> str:
    """The whole text of `ids`."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    return "".join([*map(detokenizer.push, ids), detokenizer.finish()])


def rendered(tokenizer: TextTokenizer, ids: Iterable[int]) -> str:
    """The text that `ids` were made of, special tokens written out."""
    return b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
