"""Chat messages to text through the model's chat template, in transformers' Jinja sandbox."""

import hashlib
from typing import Any

from jinja2.exceptions import TemplateError

from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.tokenizers import TextTokenizer

Message = dict[str, Any]
"""A chat message in OpenAI's shape: what templates are written against."""


class ChatTemplate:
    """One tokenizer and one template, and the digest of both together.

    digest: two requests render and tokenise alike exactly when this is equal.
    """

    def __init__(self, tokenizer: TextTokenizer, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._template = template if template is not None else _own_template(tokenizer)
        self.digest = _digest(tokenizer.digest, self._template or "")

    def render(self, messages: list[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of `messages`, special tokens written out.

        Raises InvalidRequest where there is no template, or it refuses these messages.
        """
        if self._template is None:
            raise _refused("this model has no chat template; use /v1/completions")
        try:
            text = self.tokenizer.transformers.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                chat_template=self._template,
            )
        except TemplateError as error:
            raise _refused(f"the chat template refused: {error}") from error
        except Exception as error:  # a template can raise anything that Python can
            kind = type(error).__name__
            raise _refused(f"the chat template failed: {kind}: {error}") from error
        return str(text)


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(reason, param="messages")


def _own_template(tokenizer: TextTokenizer) -> str | None:
    template = tokenizer.transformers.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) else None


def _digest(*parts: str) -> str:
    """SHA-256 over length-framed parts, so that moving text between parts changes it."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "big") + data)
    return "sha256:" + digest.hexdigest()
