"""Logprobs in the two shapes that OpenAI has: chat's objects and completions' parallel lists."""

from collections.abc import Iterable

import msgspec

from polyloom.platform.engine.messages import TokenLogprob
from polyloom.platform.generation.output_text import TextToken
from polyloom.platform.generation.tokenizers import TextTokenizer


class TopToken(msgspec.Struct, frozen=True):
    """An alternative at one position of a chat answer. bytes: UTF-8, or a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct, frozen=True):
    """One token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of chat."""

    content: list[ChatToken]


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`choices[].logprobs` of completions: one entry a token in each list.

    A prompt's first token has no logprob and no alternatives.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


def chat_logprobs(tokenizer: TextTokenizer, tokens: Iterable[TextToken]) -> ChatLogprobs:
    """Chat's shape for `tokens`, each of which carries its logprob."""
    return ChatLogprobs(
        [_chat_token(tokenizer, t.logprob) for t in tokens if t.logprob is not None]
    )


def _chat_token(tokenizer: TextTokenizer, entry: TokenLogprob) -> ChatToken:
    def parts(token_id: int) -> tuple[str, list[int]]:
        return tokenizer.token_text(token_id), list(tokenizer.token_bytes(token_id))

    text, data = parts(entry.token_id)
    top = []
    for alternative in entry.top:
        other, other_bytes = parts(alternative.token_id)
        top.append(TopToken(other, alternative.logprob, other_bytes))
    logprob = entry.logprob if entry.logprob is not None else 0.0
    return ChatToken(text, logprob, data, top)


def completion_logprobs(
    tokenizer: TextTokenizer, tokens: Iterable[TextToken]
) -> CompletionLogprobs:
    """Completions' shape for `tokens`, each of which carries its logprob."""
    out = CompletionLogprobs([], [], [], [])
    for token in tokens:
        entry = token.logprob
        if entry is None:
            continue
        out.tokens.append(tokenizer.token_text(entry.token_id))
        out.token_logprobs.append(entry.logprob)
        out.top_logprobs.append(_alternatives(tokenizer, entry))
        out.text_offset.append(token.offset)
    return out


def _alternatives(tokenizer: TextTokenizer, entry: TokenLogprob) -> dict[str, float] | None:
    """Best first, the chosen token among them. Two tokens of one text keep the better score."""
    if entry.logprob is None:
        return None
    out: dict[str, float] = {}
    for alternative in entry.top:
        out.setdefault(tokenizer.token_text(alternative.token_id), alternative.logprob)
    out.setdefault(tokenizer.token_text(entry.token_id), entry.logprob)
    return out
