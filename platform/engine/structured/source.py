"""Grammars as llguidance reads them, and the limits that hold every one of them.

JSON is written on one line, with one space after `,` and `:`, which is how models have read most
of it: where whitespace is free, a small model may write nothing else, and keys could not be forced.
A schema may say otherwise in its `x-guidance`.
"""

import json
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits

from polyloom.platform.engine.errors import GrammarError
from polyloom.routing.grammar import GrammarKind

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_BYTES = 256 << 10
MAX_REASON_CHARACTERS = 500

# Of the work of one compilation (fuel 1,000,000: about 20 ms) and one step (200,000: 15 ms), and of
# the memory of one grammar (50,000 lexer states: about 100 MB). What goes over them is an error.
LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)

JSON_OPTIONS: "JsonCompileOptions" = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}


def llguidance_source(kind: GrammarKind, text: str) -> str:
    """The grammar for `LLMatcher`. Raises GrammarError where it is too long or no JSON object."""
    check_length(text)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    try:
        return LLMatcher.grammar_from_json_schema(text, defaults=JSON_OPTIONS)
    except ValueError as error:
        raise GrammarError(reason(str(error))) from error


def check_length(text: str) -> None:
    """Raises GrammarError for more than MAX_GRAMMAR_BYTES."""
    if len(text) > MAX_GRAMMAR_BYTES or len(text.encode()) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"is longer than {MAX_GRAMMAR_BYTES >> 10} KiB")


def check(kind: GrammarKind, text: str) -> None:
    """Compile without a tokenizer. Raises GrammarError with the reason."""
    source = llguidance_source(kind, text)
    failed, messages = LLMatcher.validate_grammar_with_warnings(source, None, limits=LIMITS)
    if failed:
        raise GrammarError(reason(messages[0]))


def inline_json(schema: object) -> str:
    """`schema` as a term of a Lark grammar, with this module's way to write JSON."""
    if isinstance(schema, dict):
        schema = schema | {"x-guidance": dict(JSON_OPTIONS) | schema.get("x-guidance", {})}
    return "%json " + json.dumps(schema)


def reason(message: str) -> str:
    """What llguidance says, bounded, for the client to read."""
    return message.replace("<non-verbose/>", "").strip()[:MAX_REASON_CHARACTERS]
