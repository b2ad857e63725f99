"""What a request must be before it is queued: nothing it says can then fail a step."""

import math

from polyloom.platform.engine.messages import Refused
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams

INVALID_REQUEST = "invalid_request"
INVALID_ADAPTER = "invalid_adapter"


class Admission:
    """Checks requests against one base."""

    def __init__(self, base_digest: str, vocab_size: int) -> None:
        self._base_digest = base_digest
        self._vocab_size = vocab_size

    def check(self, request: GenerationRequest, quarantined: tuple[str, ...]) -> Refused | None:
        """Why the request cannot be taken, or None. quarantined: revisions whose files are bad."""
        combination, adapter = request.combination, request.adapter
        if combination.base_digest != self._base_digest:
            return _refused(request, f"this engine serves base {self._base_digest}")
        if combination.adapter_digest != (None if adapter is None else adapter.digest):
            return _refused(request, "adapter and combination name different revisions")
        if adapter is not None and adapter.digest in quarantined:
            message = f"revision {adapter.digest} is quarantined: its stored files are corrupt"
            return Refused(request.sequence_id, INVALID_ADAPTER, message)
        if not 0 < request.weight < math.inf:
            return _refused(request, f"weight must be finite and above 0, not {request.weight}")
        head = request.draft_head
        if combination.head_digest != (None if head is None else head.digest):
            return _refused(request, "draft head and combination name different heads")
        if not request.prompt:
            return _refused(request, "the prompt is empty")
        if not self._in_vocabulary(request.prompt):
            return _refused(request, f"prompt: token ids must be in [0, {self._vocab_size})")
        eos_ids = () if request.grammar is None else request.grammar.vocabulary.eos_ids
        if request.grammar is not None and not (eos_ids and self._in_vocabulary(eos_ids)):
            return _refused(request, f"eos_ids must be in [0, {self._vocab_size}), and not empty")
        problem = self._sampling_problem(request.sampling)
        return None if problem is None else _refused(request, problem)

    def _sampling_problem(self, sampling: SamplingParams) -> str | None:
        limits = (
            ("max_tokens", sampling.max_tokens, 0, math.inf),
            ("min_tokens", sampling.min_tokens, 0, sampling.max_tokens),
            ("temperature", sampling.temperature, 0, 1e6),
            ("top_p", sampling.top_p, 0, 1),
            ("top_k", sampling.top_k, 0, math.inf),
            ("min_p", sampling.min_p, 0, 1),
            ("repetition_penalty", sampling.repetition_penalty, 1e-6, 1e6),
            ("presence_penalty", sampling.presence_penalty, -1e6, 1e6),
            ("frequency_penalty", sampling.frequency_penalty, -1e6, 1e6),
            ("logprobs", sampling.logprobs or 0, 0, self._vocab_size),
            ("prompt_logprobs", sampling.prompt_logprobs or 0, 0, self._vocab_size),
        )
        for name, value, low, high in limits:
            if not low <= value <= high:
                return f"{name} must be in [{low}, {high}], not {value}"
        if not self._in_vocabulary(sampling.stop_token_ids):
            return f"stop_token_ids must be in [0, {self._vocab_size})"
        if not self._in_vocabulary(tuple(sampling.logit_bias)):
            return f"logit_bias: token ids must be in [0, {self._vocab_size})"
        if not all(map(math.isfinite, sampling.logit_bias.values())):
            return "logit_bias must be finite"
        return None

    def _in_vocabulary(self, token_ids: tuple[int, ...]) -> bool:
        return not token_ids or (min(token_ids) >= 0 and max(token_ids) < self._vocab_size)


def _refused(request: GenerationRequest, message: str) -> Refused:
    return Refused(request.sequence_id, INVALID_REQUEST, message)
