"""Token ids to text, a token at a time, never splitting a character."""

from polyloom.platform.generation.tokenizers import TextTokenizer

REPLACEMENT = "\ufffd"
LONGEST_PARTIAL = 3
"""A UTF-8 character has at most four bytes, so at most three characters at the end are undecided."""
WINDOW_TOKENS = 32
"""Longest run of undecidable tokens that is decoded again with each new token."""


class IncrementalDetokenizer:
    """Decodes one sequence. The deltas joined are the text of the sequence.

    Decoding needs context on the left (a leading-space rule, a byte run), so each step decodes a
    window that starts with the tokens of the last complete delta.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._context_tokens = 0
        self._sent = 0

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; empty while a character is incomplete."""
        if token_id in self._tokenizer.special_ids:
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        stable = _stable_length(text)
        delta = text[self._sent : stable]
        if stable == len(text) and delta:
            self._start_window_at(self._context_tokens)
        else:
            self._sent = max(self._sent, stable)
            if len(self._window) - self._context_tokens > WINDOW_TOKENS:
                self._start_window_at(len(self._window) - 2 * LONGEST_PARTIAL)
        return delta

    def finish(self) -> str:
        """What is left when the sequence ends: an incomplete character, as U+FFFD."""
        return self._tokenizer.decode(self._window)[self._sent :] if self._window else ""

    def _start_window_at(self, index: int) -> None:
        """Forget tokens before `index`; what the rest decodes to, but its undecided end, is sent."""
        self._window = self._window[index:]
        self._context_tokens = len(self._window)
        self._sent = _stable_length(self._tokenizer.decode(self._window))


def _stable_length(text: str) -> int:
    """Length of `text` without the trailing characters that a later byte could still change."""
    undecided = len(text) - len(text.rstrip(REPLACEMENT))
    return len(text) - min(undecided, LONGEST_PARTIAL)
