"""What an answer must be: OpenAI's `response_format`, or our `regex` and `grammar`."""

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from polyloom.platform.engine.errors import GrammarError
from polyloom.platform.engine.structured.source import check_length
from polyloom.platform.errors import InvalidRequest, InvalidSchema
from polyloom.platform.generation.nesting import nested_too_deeply
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.routing.grammar import Grammar, GrammarKind, Vocabulary

ANY_OBJECT = '{"type": "object"}'


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A schema that the answer validates against; `strict` or not, every answer does."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`text`, any JSON object, or JSON of one schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


@dataclass(frozen=True)
class AnswerFormat:
    """A grammar that a client asked for. param: the field that it came in.

    Raises InvalidSchema where it is longer than any may be, before anybody looks into it.
    """

    kind: GrammarKind
    text: str
    param: str

    def __post_init__(self) -> None:
        try:
            check_length(self.text)
        except GrammarError as error:
            raise InvalidSchema(str(error), param=self.param) from None

    def on(self, tokenizer: TextTokenizer, eos_ids: tuple[int, ...]) -> Grammar:
        """As the engine takes it. eos_ids: of the base, beside the tokenizer's.

        Raises InvalidRequest where nothing could end the answer.
        """
        vocabulary = vocabulary_of(tokenizer, eos_ids)
        if not vocabulary.eos_ids:
            raise InvalidRequest("this model names no token that ends a text", param=self.param)
        return Grammar(kind=self.kind, text=self.text, vocabulary=vocabulary)


def vocabulary_of(tokenizer: TextTokenizer, eos_ids: tuple[int, ...]) -> Vocabulary:
    """A tokenizer as the engine is told of it. eos_ids: of the base, beside the tokenizer's."""
    ends = tuple(sorted({*tokenizer.eos_ids, *eos_ids}))
    return Vocabulary(folder=str(tokenizer.folder), digest=tokenizer.digest, eos_ids=ends)


def answer_format(
    response_format: ResponseFormat | None, regex: str | None, grammar: str | None
) -> AnswerFormat | None:
    """What the three fields ask for together; None for free text. Raises InvalidRequest."""
    asked = [
        found
        for found in (
            None if response_format is None else _of_response_format(response_format),
            None if regex is None else AnswerFormat("regex", regex, "regex"),
            None if grammar is None else AnswerFormat("lark", grammar, "grammar"),
        )
        if found is not None
    ]
    if len(asked) > 1:
        message = f"cannot be combined with {asked[0].param}"
        raise InvalidRequest(message, param=asked[1].param)
    return asked[0] if asked else None


def schema_format(schema: dict[str, Any], param: str) -> AnswerFormat:
    """JSON of a schema. Raises InvalidSchema where it is too long, nested too deeply, or says how
    JSON is to be written (`x-guidance`) with something else than an object."""
    try:
        text = msgspec.json.encode(schema).decode()
    except RecursionError:
        raise InvalidSchema("is nested too deeply", param=param) from None
    asked = AnswerFormat("json_schema", text, param)
    if nested_too_deeply(schema):
        raise InvalidSchema("is nested too deeply", param=param)
    if not isinstance(schema.get("x-guidance", {}), dict):
        raise InvalidSchema("is no JSON object", param=param + "/x-guidance")
    return asked


def _of_response_format(asked: ResponseFormat) -> AnswerFormat | None:
    if (asked.json_schema is not None) != (asked.type == "json_schema"):
        missing = asked.json_schema is None
        message = "is missing" if missing else f"does not go with the type {asked.type}"
        raise InvalidRequest(message, param="response_format.json_schema")
    if asked.json_schema is not None:
        return schema_format(asked.json_schema.schema, "response_format.json_schema.schema")
    if asked.type == "json_object":
        return AnswerFormat("json_schema", ANY_OBJECT, "response_format")
    return None
