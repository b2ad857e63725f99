"""Chat messages to text through the model's chat template, in transformers' Jinja sandbox.

The operator's template is rendered here; one that a revision ships, by a worker process.
"""

import asyncio
import hashlib
from functools import partial
from typing import Any

from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.template_jobs import TemplateFault, TemplateJob, fault_of
from polyloom.platform.generation.template_workers import TemplateWorkers
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.platform.generation.tools.formats import ToolFormat, format_of, knows_tools

RENDER_INLINE_MESSAGES = 64
"""Longer conversations are rendered in a thread: a message takes some ten microseconds."""

Message = dict[str, Any]
"""A chat message in OpenAI's shape: what templates are written against."""


class ChatTemplate:
    """One tokenizer and one template, and the digest of both together.

    digest: two requests render and tokenise alike exactly when this is equal.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: str | None = None,
        workers: TemplateWorkers | None = None,
    ) -> None:
        """workers: who renders it; None: this process, for the operator's own template."""
        self.tokenizer = tokenizer
        self._workers = workers
        self._template = template if template is not None else _own_template(tokenizer)
        self.digest = _digest(tokenizer.digest, self._template or "")

    @property
    def knows_tools(self) -> bool:
        """Whether it does something with the tools that it is given."""
        return knows_tools(self._template or "")

    @property
    def tool_format(self) -> ToolFormat:
        """How its model writes calls. Raises InvalidRequest where nobody here can read them."""
        return format_of(self._template or "")

    async def render(
        self, messages: list[Message], tenant: str, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """The prompt text of `messages`, special tokens written out. tools: in OpenAI's shape.

        Raises InvalidRequest where there is no template, it refuses these messages or goes over a
        worker's limits; QueueFull, EngineUnavailable where no worker could take it.
        """
        if self._template is None:
            raise _refused("this model has no chat template; use /v1/completions")
        if self._workers is None:
            render = partial(self._render_here, self._template, messages, tools)
            if len(messages) <= RENDER_INLINE_MESSAGES:
                return render()
            return await asyncio.to_thread(render)
        special_tokens = self.tokenizer.transformers.special_tokens_map
        job = TemplateJob(self._template, messages, special_tokens, tools)
        try:
            return await self._workers.run(tenant, job)
        except TemplateFault as fault:
            raise _refused(str(fault)) from fault

    def _render_here(
        self, template: str, messages: list[Message], tools: list[dict[str, Any]] | None
    ) -> str:
        try:
            text = self.tokenizer.transformers.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                chat_template=template,
            )
        except Exception as error:  # a template can raise anything that Python can
            raise _refused(fault_of(error)) from error
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
