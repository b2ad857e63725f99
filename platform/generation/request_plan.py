"""An OpenAI body's parameters to the engine's sampling parameters, checked."""

import re
import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from polyloom.platform.errors import ContextLengthExceeded, InvalidRequest
from polyloom.platform.generation.answer_formats import (
    AnswerFormat,
    ResponseFormat,
    answer_format,
)
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.routing.drafts import MAX_DRAFT_TOKENS, DraftPolicy
from polyloom.routing.sampling_params import SamplingParams

MAX_CHOICES = 128
MAX_SEQUENCES = 512
"""Of one request: its prompts times `n`."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 512
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 1024
MAX_SALT_CHARACTERS = 256
MAX_DOMAIN_CHARACTERS = 64
SEED_MASK = (1 << 64) - 1
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class SamplingOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common; null means the default.

    Beyond OpenAI's fields: top_k, min_p, repetition_penalty, ignore_eos, min_tokens,
    stop_token_ids, cache_salt (prompts share cached blocks only with prompts of the same salt),
    drafts (how next tokens are guessed; no text depends on it, nor on `metadata.domain`),
    regex (all of the answer matches it) and grammar (likewise, in llguidance's Lark). The fields
    from `metadata` on are sent by clients, change no token and are ignored.
    """

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    cache_salt: str | None = None
    drafts: DraftPolicy | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None
    metadata: Any = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


@dataclass(frozen=True)
class ServedModel:
    """What the engine serves.

    context: tokens of prompt and answer.  prompt: tokens of the prompt alone.
    eos_ids: tokens that end a sequence of the base, whatever tokenizer a revision ships.
    """

    context: int
    prompt: int
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class LogprobsPlan:
    """Alternatives asked for beside each chosen token, and each prompt token; None: no logprobs."""

    output: int | None = None
    prompt: int | None = None


def plan_sampling(
    options: SamplingOptions,
    tokenizer: TextTokenizer,
    model: ServedModel,
    *,
    seed: int,
    max_tokens: int,
    logprobs: LogprobsPlan,
) -> SamplingParams:
    """Parameters of a request's first choice. Raises InvalidRequest naming the field."""
    vocabulary = tokenizer.vocabulary_size
    min_tokens = _within("min_tokens", options.min_tokens, 0, 0, max_tokens)
    stop_ids = set(options.stop_token_ids or ())
    for token_id in stop_ids:
        _require_token("stop_token_ids", token_id, vocabulary)
    if not options.ignore_eos:
        stop_ids.update(tokenizer.eos_ids, model.eos_ids)
    if min_tokens and len(stop_ids) >= vocabulary:
        raise InvalidRequest("leave no token for min_tokens", param="stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        min_tokens=int(min_tokens),
        temperature=_within("temperature", options.temperature, 1.0, 0.0, 2.0),
        top_p=_within("top_p", options.top_p, 1.0, 0.0, 1.0),
        top_k=_top_k(options.top_k, vocabulary),
        min_p=_within("min_p", options.min_p, 0.0, 0.0, 1.0),
        repetition_penalty=_within("repetition_penalty", options.repetition_penalty, 1.0, 0.01, 10),
        presence_penalty=_within("presence_penalty", options.presence_penalty, 0.0, -2.0, 2.0),
        frequency_penalty=_within("frequency_penalty", options.frequency_penalty, 0.0, -2.0, 2.0),
        logit_bias=_logit_bias(options.logit_bias, vocabulary),
        stop_token_ids=tuple(sorted(stop_ids)),
        logprobs=logprobs.output,
        prompt_logprobs=logprobs.prompt,
    )


def plan_choices(options: SamplingOptions, prompts: int = 1) -> int:
    """`n`, checked: for each of `prompts`, at most MAX_SEQUENCES in all."""
    return int(_within("n", options.n, 1, 1, min(MAX_CHOICES, MAX_SEQUENCES // prompts)))


def plan_seed(options: SamplingOptions) -> int:
    """The client's seed as 64 bits, or a random one."""
    return secrets.randbits(64) if options.seed is None else options.seed & SEED_MASK


def plan_stops(options: SamplingOptions) -> tuple[str, ...]:
    """Stop strings, checked."""
    stops = options.stop
    if stops is None:
        return ()
    if isinstance(stops, str):
        stops = [stops]
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"at most {MAX_STOPS} stop strings", param="stop")
    if any(not 0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise InvalidRequest(
            f"stop strings have 1 to {MAX_STOP_CHARACTERS} characters", param="stop"
        )
    return tuple(stops)


def plan_answer_format(options: SamplingOptions) -> AnswerFormat | None:
    """The grammar of the answer, not looked into yet; None for free text."""
    asked = answer_format(options.response_format, options.regex, options.grammar)
    if asked is not None and options.min_tokens:
        raise InvalidRequest(f"cannot be combined with {asked.param}", param="min_tokens")
    return asked


def plan_salt(options: SamplingOptions) -> str | None:
    """The salt of the prompt's cache namespace, checked."""
    salt = options.cache_salt
    if salt is not None and not 0 < len(salt) <= MAX_SALT_CHARACTERS:
        raise InvalidRequest(f"has 1 to {MAX_SALT_CHARACTERS} characters", param="cache_salt")
    return salt


def plan_drafts(options: SamplingOptions, default: DraftPolicy) -> DraftPolicy:
    """How the request's tokens are drafted, checked."""
    if isinstance(options.drafts, int):
        return int(_within("drafts", options.drafts, 0, 0, MAX_DRAFT_TOKENS))
    return default if options.drafts is None else options.drafts


def plan_domain(options: SamplingOptions) -> str:
    """What drafts of the request are measured under: the `domain` of its metadata, else the model
    that it names."""
    domain = options.metadata.get("domain") if isinstance(options.metadata, dict) else None
    if isinstance(domain, str) and 0 < len(domain) <= MAX_DOMAIN_CHARACTERS:
        return domain
    return options.model


def plan_max_tokens(
    asked: int | None, default: int | None, prompt_tokens: int, model: ServedModel, param: str
) -> int:
    """Tokens to generate: what was asked, else `default`, else what the context leaves.

    Raises ContextLengthExceeded when the prompt leaves too little room, InvalidRequest below 1.
    """
    room = model.context - prompt_tokens
    if prompt_tokens > model.prompt or room < 1:
        longest = min(model.prompt, model.context - 1)
        raise ContextLengthExceeded(
            f"this model takes prompts of at most {longest} tokens; yours has {prompt_tokens}",
            param=param,
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked < 1:
        raise InvalidRequest("must be at least 1", param="max_tokens")
    if asked > room:
        raise ContextLengthExceeded(
            f"this model's context is {model.context} tokens; your prompt has {prompt_tokens} and "
            f"you asked for {asked} more",
            param="max_tokens",
        )
    return asked


def check_top_logprobs(param: str, count: int) -> int:
    """Number of alternatives, checked."""
    return int(_within(param, count, 0, 0, MAX_TOP_LOGPROBS))


def _within(param: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidRequest(f"{value} is not between {low} and {high}", param=param)
    return value


def _top_k(value: int | None, vocabulary: int) -> int:
    """-1 is how some clients write "all"; so is any number from the vocabulary's size on."""
    if value is None or value == -1:
        return 0
    if value < 0:
        raise InvalidRequest(f"{value} is negative", param="top_k")
    return min(value, vocabulary)


def _logit_bias(bias: dict[str, float] | None, vocabulary: int) -> dict[int, float]:
    if not bias:
        return {}
    if len(bias) > MAX_BIASES:
        raise InvalidRequest(f"at most {MAX_BIASES} entries", param="logit_bias")
    out: dict[int, float] = {}
    for key, value in bias.items():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(f"{key[:32]!r} is not a token id", param="logit_bias")
        _require_token("logit_bias", int(key), vocabulary)
        out[int(key)] = _within("logit_bias", value, 0.0, -100.0, 100.0)
    return out


def _require_token(param: str, token_id: int, vocabulary: int) -> None:
    if not 0 <= token_id < vocabulary:
        raise InvalidRequest(
            f"token id {token_id} is not in the vocabulary of {vocabulary}", param=param
        )
