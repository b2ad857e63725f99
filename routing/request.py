"""One sequence to generate, as it enters the engine's queue."""

import msgspec

from polyloom.adapters.source import AdapterSource
from polyloom.routing.combination import Combination
from polyloom.routing.sampling_params import SamplingParams


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt, the combination it runs on and how to sample.

    sequence_id: unique over all API processes; a request with `n` choices is `n` of these.
    adapter: files of `combination.adapter_digest`; None exactly when that digest is None.
    prompt: token ids, never empty.
    deadline: unix seconds after which the sequence is ended with reason `deadline`; None for none.
    """

    sequence_id: str
    tenant: str
    combination: Combination
    adapter: AdapterSource | None
    prompt: tuple[int, ...]
    sampling: SamplingParams
    deadline: float | None = None
