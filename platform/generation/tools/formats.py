"""How models write tool calls: a few families, told apart by their chat templates."""

import re
from dataclasses import dataclass

from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.tokenizers import TextTokenizer

_USES_TOOLS = re.compile(r"\btools\b")


@dataclass(frozen=True)
class ToolFormat:
    """Calls are JSON objects with a `name` and arguments.

    opening, closing: what stands around them; closing may be empty.
    listed: one pair of marks holds a JSON list of them; else each has marks of its own.
    bare: an answer that begins with an object is a call without any marks, and one call only.
    arguments: the key of the arguments.
    short_ids: templates of the family accept ids of nine letters and digits only.
    """

    opening: str
    closing: str
    listed: bool = False
    bare: bool = False
    arguments: str = "arguments"
    short_ids: bool = False

    def special_ids(self, tokenizer: TextTokenizer) -> frozenset[int]:
        """The marks that are special tokens."""
        found = map(tokenizer.special_id, (self.opening, self.closing))
        return frozenset(token_id for token_id in found if token_id is not None)


HERMES = ToolFormat("<tool_call>", "</tool_call>")
"""Hermes, Qwen2.5, Qwen3 and many others."""
LISTED = ToolFormat("<tool_call>", "</tool_call>", listed=True)
"""SmolLM2 by its model card; here for every model whose template knows no tools."""
LLAMA3 = ToolFormat("<|python_tag|>", "", bare=True, arguments="parameters")
MISTRAL = ToolFormat("[TOOL_CALLS]", "", listed=True, short_ids=True)


def knows_tools(template: str) -> bool:
    """Whether a chat template does something with a request's tools."""
    return _USES_TOOLS.search(template) is not None


def format_of(template: str) -> ToolFormat:
    """The family of a template. Raises InvalidRequest for one whose calls nobody here can read."""
    if not knows_tools(template):
        return LISTED
    if "[TOOL_CALLS]" in template and "[ARGS]" not in template:
        return MISTRAL
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "<|python_tag|>" in template or '{"name": function name, "parameters":' in template:
        return LLAMA3
    message = "this model writes calls in a form that is not known here"
    raise InvalidRequest(message, param="tools")
