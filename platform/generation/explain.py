"""Why one request does, or does not, reuse what another left in the prefix cache."""

from dataclasses import dataclass
from typing import Literal

import msgspec

from polyloom.platform.generation.detokenize import rendered
from polyloom.platform.generation.differences import DifferenceKind, text_difference
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.routing.request import GenerationRequest

SHOWN_TOKENS = 16
CONTEXT_TOKENS = 48
"""Before and after the first differing token, to tell the kind of text by."""

Field = Literal["owner", "base", "revision", "template", "tokenizer", "tools", "salt", "tokens"]


@dataclass(frozen=True)
class PlannedRequest:
    """A request that was planned but not run. label: of the revision that it would run on."""

    request: GenerationRequest
    label: str
    tokenizer: TextTokenizer


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that sets the requests apart. first, second: what each has there.

    kind, position, before: for `tokens`: what kind of text differs, the index of the first
    differing token, and the text up to it.
    """

    field: Field
    first: str | None
    second: str | None
    kind: DifferenceKind | None = None
    position: int | None = None
    before: str | None = None
    advice: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """differences: all of them, in the order in which a cache's key has them; without any before
    `tokens` the second request reuses `shared_blocks` whole blocks (`shared_tokens` tokens) of the
    first. common_tokens: that both prompts begin with, whatever else differs."""

    first_tokens: int
    second_tokens: int
    common_tokens: int
    block_size: int
    shared_blocks: int
    shared_tokens: int
    first_revision: str
    second_revision: str
    differences: tuple[Difference, ...]


ADVICE: dict[Field, str] = {
    "owner": "one request's cache is the tenant's own, the other's a share group's",
    "base": "caches of different bases have nothing in common",
    "revision": "K and V differ between revisions: send both to one revision",
    "template": "the chat templates differ: a template edit starts a new cache",
    "tokenizer": "the tokenizers differ",
    "tools": "the tool schemas differ: send the same tools in the same order",
    "salt": "the cache_salt differs, which asks for caches of their own",
    "tokens": "the prompts differ",
}
TOKEN_ADVICE: dict[DifferenceKind, str] = {
    "timestamp": "a time or date changes: put it after what should be reused, or round it",
    "secret": "a secret or token is part of the prompt: keep it out, or behind the shared part",
    "id": "a random id is part of the prompt: put it after what should be reused",
    "number": "a number changes: put what changes after what should be reused",
    "text": "the texts differ: put what differs after what should be reused",
}


def explain(first: PlannedRequest, second: PlannedRequest, block_size: int) -> Explanation:
    """Compare two requests of one tenant, first the namespaces, then the tokens."""
    one, other = first.request.prompt, second.request.prompt
    common = _common(one, other)
    differences = [*_fields(first, second)]
    reusable = min(common, len(other) - 1) // block_size if not differences else 0
    if common < max(len(one), len(other)):
        differences.append(_tokens(first, second, common))
    return Explanation(
        first_tokens=len(one),
        second_tokens=len(other),
        common_tokens=common,
        block_size=block_size,
        shared_blocks=reusable,
        shared_tokens=reusable * block_size,
        first_revision=first.label,
        second_revision=second.label,
        differences=tuple(differences),
    )


def _fields(first: PlannedRequest, second: PlannedRequest) -> list[Difference]:
    found = []
    for name, one, other in zip(_NAMES, _values(first), _values(second), strict=True):
        if one != other:
            found.append(Difference(field=name, first=one, second=other, advice=ADVICE[name]))
    return found


_NAMES: tuple[Field, ...] = (
    "owner",
    "base",
    "revision",
    "template",
    "tokenizer",
    "tools",
    "salt",
)


def _values(planned: PlannedRequest) -> tuple[str | None, ...]:
    scope, combination = planned.request.cache, planned.request.combination
    owner = None if scope is None else f"{scope.owner.kind}:{scope.owner.name}"
    return (
        owner,
        combination.base_digest,
        combination.adapter_digest,
        combination.template_digest,
        None if scope is None else scope.tokenizer_digest,
        None if scope is None else scope.tool_schema_digest,
        None if scope is None else scope.salt,
    )


def _tokens(first: PlannedRequest, second: PlannedRequest, at: int) -> Difference:
    one, other = first.request.prompt, second.request.prompt
    start = max(0, at - CONTEXT_TOKENS)
    end = at + CONTEXT_TOKENS
    text = text_difference(
        rendered(first.tokenizer, one[start:end]), rendered(second.tokenizer, other[start:end])
    )
    kind: DifferenceKind = "text" if text is None else text.kind
    return Difference(
        field="tokens",
        first=rendered(first.tokenizer, one[at : at + SHOWN_TOKENS]),
        second=rendered(second.tokenizer, other[at : at + SHOWN_TOKENS]),
        kind=kind,
        position=at,
        before=rendered(first.tokenizer, one[max(0, at - SHOWN_TOKENS) : at]),
        advice=TOKEN_ADVICE[kind],
    )


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
