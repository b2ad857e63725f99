"""Engine tokens of one choice to the text, ids and logprobs that a client may see."""

from collections import deque
from dataclasses import dataclass

from polyloom.platform.engine.messages import TokenLogprob
from polyloom.platform.generation.detokenize import IncrementalDetokenizer
from polyloom.platform.generation.stop_strings import StopStrings
from polyloom.platform.generation.tokenizers import TextTokenizer


@dataclass(frozen=True)
class TextToken:
    """One visible token. offset: characters of the choice's text before it."""

    token_id: int
    offset: int
    logprob: TokenLogprob | None


@dataclass(frozen=True)
class TextDelta:
    """Text that became final, and the tokens it came from."""

    text: str
    tokens: tuple[TextToken, ...]

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens)


class OutputText:
    """Text of one choice: detokenised, cut at the first stop string, tokens cut with it.

    A token is shown when text of it is shown; tokens wholly behind a stop string never are.
    Stop strings count only after `min_tokens` tokens.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        stops: tuple[str, ...] = (),
        min_tokens: int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """shown: special tokens that are text here."""
        self._detokenizer = IncrementalDetokenizer(tokenizer, shown)
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._pending: deque[TextToken] = deque()
        self._decoded = 0
        self._shown = 0
        self.tokens_seen = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token_id: int, logprob: TokenLogprob | None = None) -> TextDelta:
        """What `token_id` makes final. After a match nothing is taken any more."""
        self.tokens_seen += 1
        self._pending.append(TextToken(token_id, self._decoded, logprob))
        text = self._detokenizer.push(token_id)
        self._decoded += len(text)
        shown = text if self.tokens_seen < self._min_tokens else self._stops.push(text)
        return self._release(shown, everything=False)

    def finish(self) -> TextDelta:
        """The rest, when the sequence ended for another reason than a stop string."""
        if self.stopped is not None:
            return TextDelta("", ())
        shown = self._stops.push(self._detokenizer.finish())
        if self.stopped is None:
            shown += self._stops.finish()
        return self._release(shown, everything=self.stopped is None)

    def _release(self, text: str, *, everything: bool) -> TextDelta:
        self._shown += len(text)
        tokens = []
        while self._pending and (everything or self._pending[0].offset < self._shown):
            tokens.append(self._pending.popleft())
        return TextDelta(text, tuple(tokens))
