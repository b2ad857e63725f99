"""Sequences with grammars in the engine, beside others."""

import json
import threading
from concurrent.futures import Future

import pytest
from llguidance import LLParserLimits

from polyloom.platform.engine.messages import Finished
from polyloom.platform.engine.structured import compiler

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"kind": {"enum": ["a", "bb", "ccc"]}, "sure": {"type": "boolean"}},
        "required": ["kind", "sure"],
        "additionalProperties": False,
    }
)
ENDLESS = "[a-z ]*"
PROMPT = (5, 6, 7)


@pytest.fixture
def engine(engine_factory):
    return engine_factory()


def text_of(tokenizer, answer) -> str:
    return tokenizer.decode(answer.token_ids, skip_special_tokens=True)


def test_every_choice_matches_and_ends_by_itself(
    engine, request_factory, run, make_grammar, tokenizer
) -> None:
    """Sampled hot from a random model: nothing but the grammar makes it JSON."""
    grammar = make_grammar("json_schema", SCHEMA)
    requests = [
        request_factory(PROMPT, max_tokens=80, temperature=2.0, seed=3, choice=n, grammar=grammar)
        for n in range(5)
    ]
    answers = run(engine, [*requests, request_factory(PROMPT)])
    texts = {text_of(tokenizer, answer) for answer in answers[:5]}
    assert len(texts) > 1
    for text in texts:
        value = json.loads(text)
        assert json.dumps(value) == text
        assert set(value) == {"kind", "sure"}
    assert {(a.end.reason, a.end.stop_token) for a in answers[:5]} == {("stop", None)}


def test_an_open_grammar_ends_by_the_stop_token_or_by_length(
    engine, request_factory, run, make_grammar, tokenizer
) -> None:
    grammar = make_grammar("regex", ENDLESS)
    bias = {"logit_bias": {2: 100.0}, "stop_token_ids": (2,)}
    stopped, cut = run(
        engine,
        [
            request_factory(PROMPT, grammar=grammar, **bias),
            request_factory(PROMPT, grammar=grammar, max_tokens=5, temperature=1.0),
        ],
    )
    assert (stopped.end.reason, stopped.end.stop_token, stopped.token_ids) == ("stop", 2, [])
    assert cut.end.reason == "length"
    assert set(text_of(tokenizer, cut)) <= set("abcdefghijklmnopqrstuvwxyz ")


def test_logprobs_stay_the_models_own(engine, request_factory, run, make_grammar) -> None:
    (answer,) = run(
        engine, [request_factory(PROMPT, grammar=make_grammar("regex", "zzzz"), logprobs=0)]
    )
    assert answer.end.reason == "stop"
    assert all(entry.logprob < -0.1 for entry in answer.logprobs)


def test_a_preemption_changes_no_text(
    engine, engine_factory, request_factory, run, make_grammar
) -> None:
    grammar = make_grammar("regex", "([a-z]+ [0-9]{3}; )*")
    requests = [
        request_factory(PROMPT, max_tokens=30, temperature=1.5, seed=n, grammar=grammar)
        for n in range(3)
    ]
    alone = [run(engine, [request])[0].token_ids for request in requests]
    tight = engine_factory(kv_memory=5 * 12288, max_model_len=48, prefix_cache=False)
    together = run(tight, requests)
    assert tight.status().preemptions_total > 0
    assert [answer.token_ids for answer in together] == alone


def test_one_that_compiles_holds_nobody_up(
    engine, request_factory, make_grammar, monkeypatch
) -> None:
    compiled = engine._grammars._compiler.compile(make_grammar("regex", "ab")).result(30)
    slow: Future = Future()
    monkeypatch.setattr(engine._grammars._compiler, "compile", lambda grammar: slow)
    engine.submit(request_factory(PROMPT, id="slow", grammar=make_grammar("regex", "ab")))
    engine.submit(request_factory(PROMPT, id="quick", max_tokens=3))
    finished = [e.sequence_id for _ in range(9) for e in engine.step() if isinstance(e, Finished)]
    assert finished == ["quick"]
    assert engine.status().waiting == 1
    slow.set_result(compiled)
    while engine.has_work:
        finished += [e.sequence_id for e in engine.step() if isinstance(e, Finished)]
    assert finished == ["quick", "slow"]
    engine.check_idle()


def test_one_that_compiles_can_be_aborted(
    engine, request_factory, make_grammar, monkeypatch
) -> None:
    monkeypatch.setattr(engine._grammars._compiler, "compile", lambda grammar: Future())
    engine.submit(request_factory(PROMPT, id="gone", grammar=make_grammar("regex", "ab")))
    assert engine.abort("gone").reason == "abort"
    assert not engine.has_work
    assert engine.step() == []
    engine.check_idle()


@pytest.mark.parametrize(
    ("text", "said"), [("(a", "unclosed"), ("([a-z]{1,9}x|.*z.{9}y)*", "gave up")]
)
def test_a_grammar_that_fails_ends_its_own_request_alone(
    engine, request_factory, run, make_grammar, monkeypatch, text, said
) -> None:
    few_states = LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr(compiler, "LIMITS", few_states)
    grammar = make_grammar("regex", text)
    bad = request_factory(PROMPT, max_tokens=40, temperature=2.0, grammar=grammar)
    good = request_factory(PROMPT, max_tokens=20)
    bad_answer, good_answer = run(engine, [bad, good])
    assert (bad_answer.end.reason, bad_answer.end.error_code) == ("error", "invalid_schema")
    assert said in bad_answer.end.error
    assert good_answer.end.reason == "length"


class Panic(BaseException):
    """As pyo3 raises them."""


def test_whatever_compiling_raises_ends_one_request_alone(
    engine, request_factory, run, make_grammar, monkeypatch
) -> None:
    failed: Future = Future()
    failed.set_exception(Panic())
    monkeypatch.setattr(engine._grammars._compiler, "compile", lambda grammar: failed)
    bad = request_factory(PROMPT, grammar=make_grammar("regex", "ab"))
    bad_answer, good_answer = run(engine, [bad, request_factory(PROMPT, max_tokens=3)])
    assert (bad_answer.end.reason, bad_answer.end.error_code) == ("error", "invalid_schema")
    assert good_answer.end.reason == "length"


def test_an_adapters_sequence_takes_a_grammar(
    engine, request_factory, run, make_grammar, adapter_factory, tokenizer
) -> None:
    grammar = make_grammar("json_schema", SCHEMA)
    request = request_factory(PROMPT, max_tokens=80, adapter=adapter_factory(4, 0), grammar=grammar)
    (answer,) = run(engine, [request])
    assert set(json.loads(text_of(tokenizer, answer))) == {"kind", "sure"}


def test_the_thread_ends_with_the_engine(engine_factory, request_factory, run, make_grammar):
    engine = engine_factory()
    run(engine, [request_factory(PROMPT, grammar=make_grammar("regex", "ab"))])
    threads = engine._grammars._compiler._thread._threads
    assert all(thread in threading.enumerate() for thread in threads)
    engine.close()
    assert not any(thread.is_alive() for thread in threads)
