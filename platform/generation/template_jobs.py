"""What is asked of a template worker, what it answers, and the limits that hold it."""

from typing import Any

import msgspec
from jinja2.exceptions import TemplateError

RENDER_SECONDS = 2.0
"""Wall clock of one render, compiling included. Real templates take milliseconds."""

MEMORY_BYTES = 512 << 20
"""What a worker may allocate beyond what it holds when it is ready."""

OUTPUT_BYTES = 16 << 20
"""UTF-8 of one rendered prompt: more than any request's messages."""

REASON_CHARACTERS = 500


class TemplateJob(msgspec.Struct, frozen=True):
    """Compile a template, then render it unless `messages` is None.

    tools: in OpenAI's shape.  special_tokens: what transformers lets a template see of its tokenizer.
    """

    template: str
    messages: list[dict[str, Any]] | None = None
    special_tokens: dict[str, str] = {}
    tools: list[dict[str, Any]] | None = None


class TemplateAnswer(msgspec.Struct, frozen=True):
    """The prompt text (empty when only compiled), or why there is none.

    spent: the worker still holds much of its memory and must be replaced.
    """

    text: str = ""
    fault: str | None = None
    spent: bool = False


class TemplateFault(Exception):
    """A template that cannot be served as it is; the message names the template as the cause."""


def fault_of(error: Exception) -> str:
    """What a template raised, for the client to read: bounded, and always valid UTF-8."""
    if isinstance(error, MemoryError):
        return f"the chat template needs more than {MEMORY_BYTES >> 20} MiB of memory"
    if isinstance(error, TemplateError):
        reason = f"the chat template refused: {error}"
    else:
        reason = f"the chat template failed: {type(error).__name__}: {error}"
    return reason[:REASON_CHARACTERS].encode(errors="backslashreplace").decode()
