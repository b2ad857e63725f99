"""What a sequence's text must match, as it enters the engine."""

from typing import Literal

import msgspec

GrammarKind = Literal["json_schema", "regex", "lark"]


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer that a text is written with.

    folder: holds it in Hugging Face format.  digest: of its `tokenizer.json` as loaded.
    eos_ids: tokens that end a text; at least one.
    """

    folder: str
    digest: str
    eos_ids: tuple[int, ...]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """All that a sequence writes matches this, up to the token that ends it.

    text: a JSON schema as JSON, a regular expression that the whole text matches, or a grammar in
    llguidance's Lark.
    """

    kind: GrammarKind
    text: str
    vocabulary: Vocabulary
