"""One sequence to generate, as it enters the engine's queue."""

from typing import Literal

import msgspec

from polyloom.adapters.source import AdapterSource, DraftHeadSource
from polyloom.routing.combination import Combination
from polyloom.routing.drafts import DraftPolicy
from polyloom.routing.grammar import Grammar
from polyloom.routing.sampling_params import SamplingParams


class CacheOwner(msgspec.Struct, frozen=True):
    """Whose prefix cache it is: one tenant's (by slug), or a share group's (by its id)."""

    kind: Literal["tenant", "group"]
    name: str


class CacheScope(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefix cache's namespace has beside the request's combination and the cache's dtype.

    tokenizer_digest: of the tokenizer that made the prompt.  tool_schema_digest: of the request's
    tools, None without.  salt: the request's own `cache_salt`.
    """

    owner: CacheOwner
    tokenizer_digest: str
    tool_schema_digest: str | None = None
    salt: str | None = None


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, the combination it runs on and how to sample.

    sequence_id: unique over all API processes; a request with `n` choices is `n` of these.
    adapter: files of `combination.adapter_digest`; None exactly when that digest is None.
    draft_head: files of `combination.head_digest`, likewise.
    prompt: token ids, never empty.
    deadline: unix seconds after which the sequence is ended with reason `deadline`; None for none.
    cache: where blocks of its prompt may come from and go to; None: it shares nothing.
    grammar: what the whole output must match; None: anything.
    hold: id under which the prompt's whole blocks stay pinned after its end, until released.
    drafts: how its tokens are drafted.  domain: its label, or its route, in what is learned about
    drafts and reported of them.
    conversation: id within the tenant; requests of one are started in the order of their arrival.
    weight: the tenant's share of the engine against other tenants'.
    """

    sequence_id: str
    tenant: str
    combination: Combination
    adapter: AdapterSource | None
    draft_head: DraftHeadSource | None = None
    prompt: tuple[int, ...]
    sampling: SamplingParams
    deadline: float | None = None
    cache: CacheScope | None = None
    grammar: Grammar | None = None
    hold: str | None = None
    drafts: DraftPolicy = "adaptive"
    domain: str = ""
    conversation: str | None = None
    weight: float = 1.0
