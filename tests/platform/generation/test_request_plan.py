"""What a client may ask for, and what it is told when it may not."""

import pytest

from polyloom.platform.errors import ContextLengthExceeded, InvalidRequest
from polyloom.platform.generation.request_plan import (
    LogprobsPlan,
    SamplingOptions,
    ServedModel,
    plan_choices,
    plan_max_tokens,
    plan_salt,
    plan_sampling,
    plan_seed,
    plan_stops,
)
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.routing.sampling_params import SamplingParams

MODEL = ServedModel(context=100, prompt=99, eos_ids=(7,))


def plan(tokenizer: TextTokenizer, **fields: object) -> SamplingParams:
    options = SamplingOptions(model="m", **fields)  # type: ignore[arg-type]
    return plan_sampling(options, tokenizer, MODEL, seed=1, max_tokens=10, logprobs=LogprobsPlan())


def test_defaults_are_openai_s(byte_level: TextTokenizer) -> None:
    params = plan(byte_level)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert params.logprobs is None


def test_all_eos_ids_stop_unless_ignored(byte_level: TextTokenizer) -> None:
    """The base's generation config, the tokenizer's own, and what the client adds."""
    assert plan(byte_level, stop_token_ids=[9]).stop_token_ids == (2, 7, 9)
    assert plan(byte_level, stop_token_ids=[9], ignore_eos=True).stop_token_ids == (9,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {"100000": 1.0}),
        ("logit_bias", {"1": 101.0}),
        ("logit_bias", {"9" * 5000: 1.0}),
        ("logit_bias", {"05": 1.0}),
        ("stop_token_ids", [-1]),
        ("min_tokens", 11),
    ],
)
def test_a_wrong_value_is_refused_by_name(
    byte_level: TextTokenizer, field: str, value: object
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan(byte_level, **{field: value})
    assert refused.value.param == field


def test_a_top_k_of_any_size_is_a_number_that_can_be_sent(byte_level: TextTokenizer) -> None:
    assert plan(byte_level, top_k=10**30).top_k == byte_level.vocabulary_size
    assert plan(byte_level, top_k=-1).top_k == 0


def test_stop_ids_leave_a_token_for_min_tokens(byte_level: TextTokenizer) -> None:
    every = list(range(byte_level.vocabulary_size))
    with pytest.raises(InvalidRequest) as refused:
        plan(byte_level, stop_token_ids=every, min_tokens=1)
    assert refused.value.param == "stop_token_ids"
    assert plan(byte_level, stop_token_ids=every).stop_token_ids == tuple(every)


def test_prompts_times_choices_are_bounded() -> None:
    options = SamplingOptions(model="m", n=5)
    assert plan_choices(options, prompts=100) == 5
    with pytest.raises(InvalidRequest) as refused:
        plan_choices(options, prompts=128)
    assert refused.value.param == "n"


def test_choices_and_stops_are_bounded() -> None:
    for field, value, planner in (
        ("n", 0, plan_choices),
        ("n", 1000, plan_choices),
        ("stop", [""], plan_stops),
        ("stop", ["x"] * 17, plan_stops),
    ):
        with pytest.raises(InvalidRequest) as refused:
            planner(SamplingOptions(model="m", **{field: value}))  # type: ignore[arg-type]
        assert refused.value.param == field


def test_a_salt_is_short_text() -> None:
    assert plan_salt(SamplingOptions(model="m")) is None
    assert plan_salt(SamplingOptions(model="m", cache_salt="x" * 256)) == "x" * 256
    for salt in ("", "x" * 257):
        with pytest.raises(InvalidRequest) as caught:
            plan_salt(SamplingOptions(model="m", cache_salt=salt))
        assert caught.value.param == "cache_salt"


def test_a_seed_is_64_bits_and_drawn_if_absent() -> None:
    assert plan_seed(SamplingOptions(model="m", seed=-1)) == (1 << 64) - 1
    drawn = {plan_seed(SamplingOptions(model="m")) for _ in range(8)}
    assert len(drawn) == 8


def test_max_tokens_fits_the_context() -> None:
    assert plan_max_tokens(None, None, 40, MODEL, "messages") == 60
    assert plan_max_tokens(None, 16, 40, MODEL, "prompt") == 16
    assert plan_max_tokens(None, 16, 95, MODEL, "prompt") == 5
    assert plan_max_tokens(60, None, 40, MODEL, "messages") == 60
    with pytest.raises(ContextLengthExceeded):
        plan_max_tokens(61, None, 40, MODEL, "messages")
    with pytest.raises(ContextLengthExceeded):
        plan_max_tokens(None, None, 100, MODEL, "messages")
    with pytest.raises(InvalidRequest):
        plan_max_tokens(0, None, 40, MODEL, "messages")
