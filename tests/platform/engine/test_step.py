"""The engine on a tiny random Llama in fp32, against transformers and PEFT, and against itself."""

import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from polyloom.platform.engine.errors import IntegrityError
from polyloom.platform.engine.messages import Finished, Tokens
from polyloom.platform.engine.step import MAX_FAILED_STEPS

PROMPTS = [
    tuple(int(t) for t in np.random.default_rng(n).integers(3, 512, n)) for n in (1, 5, 16, 33, 70)
]
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def reference(tiny_llama_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32).eval()


def assert_greedy(model, prompt, answer):
    """Each token is the reference model's best after what precedes it, up to near ties; its
    logprob is the reference's."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    for index, token in enumerate(answer.token_ids):
        row = logits[len(prompt) + index - 1]
        assert row.max() - row[token] < NEAR_TIE, f"token {index} of {len(prompt)} + …"
        if answer.logprobs:
            wanted = logprobs[len(prompt) + index - 1, token].item()
            assert answer.logprobs[index].logprob == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("implementation", ["reference", "auto"])
def test_greedy_equals_transformers(
    engine_factory, request_factory, run, reference, implementation
):
    engine = engine_factory(implementation=implementation)
    requests = [request_factory(prompt, max_tokens=20, logprobs=0) for prompt in PROMPTS]
    for prompt, answer in zip(PROMPTS, run(engine, requests), strict=True):
        assert len(answer.token_ids) == 20
        assert_greedy(reference, prompt, answer)


def test_a_mixed_batch_equals_peft_on_each_adapter_alone(
    engine_factory, request_factory, run, tiny_llama_folder, reference, adapter_factory
):
    sources = [adapter_factory(rank, seed) for seed, rank in enumerate((1, 4, 8, 20))]
    engine = engine_factory()
    mix = [(prompt, source) for prompt in PROMPTS for source in (None, *sources)]
    order = np.random.default_rng(0).permutation(len(mix))
    mix = [mix[i] for i in order]
    answers = run(
        engine, [request_factory(p, adapter=a, max_tokens=12, logprobs=0) for p, a in mix]
    )
    for source in (None, *sources):
        model = reference
        if source is not None:
            base = AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32)
            model = PeftModel.from_pretrained(base, source.path).eval()
        for (prompt, adapter), answer in zip(mix, answers, strict=True):
            if adapter is source:
                assert_greedy(model, prompt, answer)


def test_one_seed_gives_one_text_alone_batched_chunked_and_preempted(
    engine_factory, request_factory, run
):
    def requests():
        return [
            request_factory(p, max_tokens=24, seed=11 + i, temperature=1.0, top_p=0.95)
            for i, p in enumerate(PROMPTS)
        ]

    texts = {}
    alone = engine_factory()
    texts["alone"] = [run(alone, [request])[0].token_ids for request in requests()]
    texts["batched"] = [a.token_ids for a in run(engine_factory(), requests())]
    chunked = engine_factory(token_budget=7, max_running=7)
    texts["chunked"] = [a.token_ids for a in run(chunked, requests())]
    block_bytes = 2 * 3 * 2 * 16 * 16 * 4
    tight = engine_factory(kv_memory=block_bytes * 8)
    answers = run(tight, requests())
    assert sum(answer.end.timings.preemptions for answer in answers) > 0
    texts["preempted"] = [a.token_ids for a in answers]
    assert texts["alone"] == texts["batched"] == texts["chunked"] == texts["preempted"]
    other = [request_factory(p, max_tokens=24, seed=99, temperature=1.0) for p in PROMPTS]
    assert [a.token_ids for a in run(alone, other)] != texts["alone"]


@pytest.mark.parametrize("budget", [16])
def test_chunk_edges_change_nothing(engine_factory, request_factory, run, reference, budget):
    engine = engine_factory(token_budget=budget, max_running=1)
    rng = np.random.default_rng(5)
    for length in (budget - 1, budget, budget + 1, 2 * budget - 1, 2 * budget, 2 * budget + 1):
        prompt = tuple(int(t) for t in rng.integers(3, 512, length))
        (answer,) = run(engine, [request_factory(prompt, logprobs=0)])
        assert_greedy(reference, prompt, answer)


@pytest.mark.parametrize("options", [{}, {"token_budget": 16, "max_running": 4}])
def test_prompt_logprobs_are_given_once_each_in_order(
    engine_factory, request_factory, run, reference, options
):
    engine = engine_factory(**options)
    requests = [request_factory(p, prompt_logprobs=2, max_tokens=2) for p in PROMPTS]
    for prompt, answer in zip(PROMPTS, run(engine, requests), strict=True):
        assert [entry.token_id for entry in answer.prompt_logprobs] == list(prompt)
        assert answer.prompt_logprobs[0].logprob is None
        with torch.inference_mode():
            logprobs = torch.log_softmax(reference(torch.tensor([prompt])).logits[0], -1)
        for position, entry in enumerate(answer.prompt_logprobs[1:]):
            wanted = logprobs[position, prompt[position + 1]].item()
            assert entry.logprob == pytest.approx(wanted, abs=1e-4)
            assert entry.top[0].logprob == pytest.approx(logprobs[position].max().item(), abs=1e-4)


def test_preemption_sends_no_prompt_logprob_twice(engine_factory, request_factory, run):
    engine = engine_factory(kv_memory=8 * 2 * 3 * 2 * 16 * 16 * 4)
    requests = [request_factory(p, prompt_logprobs=0, max_tokens=24) for p in PROMPTS]
    answers = run(engine, requests)
    assert sum(answer.end.timings.preemptions for answer in answers) > 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert [entry.token_id for entry in answer.prompt_logprobs] == list(prompt)


def test_nothing_to_generate_ends_after_the_prompt(engine_factory, request_factory, run):
    engine = engine_factory(token_budget=16, max_running=4)
    (answer,) = run(engine, [request_factory(PROMPTS[3], max_tokens=0, prompt_logprobs=0)])
    assert (answer.token_ids, answer.end.reason) == ([], "length")
    assert len(answer.prompt_logprobs) == len(PROMPTS[3])
    assert answer.end.completion_tokens == 0


def test_a_stop_token_ends_the_text_and_is_counted_but_not_shown(
    engine_factory, request_factory, run
):
    engine = engine_factory()
    (free,) = run(engine, [request_factory(PROMPTS[1], max_tokens=6)])
    stop = free.token_ids[3]
    cut = free.token_ids.index(stop)
    (answer,) = run(
        engine, [request_factory(PROMPTS[1], max_tokens=6, stop_token_ids=(stop,), logprobs=0)]
    )
    assert answer.token_ids == free.token_ids[:cut]
    assert len(answer.logprobs) == cut
    assert (answer.end.reason, answer.end.stop_token) == ("stop", stop)
    assert answer.end.completion_tokens == cut + 1


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_max_tokens_ends_by_length(engine_factory, request_factory, run, max_tokens):
    (answer,) = run(engine_factory(), [request_factory(PROMPTS[1], max_tokens=max_tokens)])
    assert len(answer.token_ids) == max_tokens == answer.end.completion_tokens
    assert (answer.end.reason, answer.end.prompt_tokens) == ("length", 5)


def test_an_abort_frees_everything_at_once(engine_factory, request_factory, adapter_factory):
    engine = engine_factory(max_running=2)
    source = adapter_factory(4, 7)
    requests = [
        request_factory(PROMPTS[4], max_tokens=50),
        request_factory(PROMPTS[2], max_tokens=50, adapter=source),
        request_factory(PROMPTS[2], max_tokens=50),
    ]
    for request in requests:
        engine.submit(request)
    for _ in range(3):
        engine.step()
    snapshot = engine.snapshot()
    assert snapshot.sequences == tuple(r.sequence_id for r in requests)
    assert snapshot.status.blocks_free < snapshot.status.blocks_total
    for request in requests:
        assert engine.abort(request.sequence_id).reason == "abort"
        assert engine.abort(request.sequence_id) is None
    assert not engine.has_work
    after = engine.snapshot()
    assert after.sequences == ()
    assert after.status.blocks_free == after.status.blocks_total
    assert all(adapter.pinned_by == 0 for adapter in after.adapters)


def test_the_idle_check_finds_a_leak(engine_factory, request_factory):
    engine = engine_factory()
    engine.check_idle()
    engine.submit(request_factory(PROMPTS[2], max_tokens=50))
    engine.step()
    with pytest.raises(IntegrityError):
        engine.check_idle()


def test_a_deadline_ends_a_sequence_wherever_it_is(engine_factory, request_factory):
    engine = engine_factory(max_running=1)
    past = time.time() - 1
    engine.submit(request_factory(PROMPTS[1], max_tokens=50, id="running"))
    engine.step()
    engine.submit(request_factory(PROMPTS[1], deadline=past, id="waiting"))
    ended = [e for e in engine.step() if isinstance(e, Finished)]
    assert [(e.sequence_id, e.reason) for e in ended] == [("waiting", "deadline")]
    engine.abort("running")
    assert not engine.has_work
    engine.check_idle()


def test_a_full_queue_and_a_long_request_are_refused(engine_factory, request_factory):
    engine = engine_factory(queue_limit=2)
    refused = engine.submit(request_factory(PROMPTS[4], max_tokens=2000))
    assert refused.code == "context_length_exceeded"
    for _ in range(2):
        assert engine.submit(request_factory(PROMPTS[1])) is None
    refused = engine.submit(request_factory(PROMPTS[1]))
    assert (refused.code, refused.retry_after) == ("queue_full", 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ()}, "empty"),
        ({"prompt": (1, 512)}, "prompt"),
        ({"prompt": (-1,)}, "prompt"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 2.0}, "min_p"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": {512: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"stop_token_ids": (600,)}, "stop_token_ids"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 513}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_what_could_fail_a_step_is_refused_by_name(
    engine_factory, request_factory, options, message
):
    engine = engine_factory()
    request = request_factory(**{"prompt": (1, 2), **options})
    refused = engine.submit(request)
    assert refused.code == "invalid_request"
    assert message in refused.message


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_that_is_no_share_is_refused(engine_factory, request_factory, weight):
    request = msgspec.structs.replace(request_factory((1, 2)), weight=weight)
    refused = engine_factory().submit(request)
    assert (refused.code, "weight" in refused.message) == ("invalid_request", True)


def test_chunks_are_counted_and_their_size_follows_the_target(engine_factory, request_factory, run):
    """No decode takes less than a microsecond, so chunks go down to their floor."""
    engine = engine_factory(itl_target=1e-6, token_budget=512, max_running=4)
    talks = [request_factory((1, 2), max_tokens=60) for _ in range(3)]
    run(engine, [*talks, *(request_factory((5,) * 300, max_tokens=1) for _ in range(6))])
    status = engine.status()
    assert status.prompt_tokens_total == 3 * 2 + 6 * 300
    assert (status.chunk_tokens, status.chunk_changes_total > 0) == (64, True)
    assert status.chunks_total > 3 + 6
    assert status.chunk_overhead_seconds_total > 0


def test_failing_logits_end_their_sequence_alone(engine_factory, request_factory, monkeypatch, run):
    engine = engine_factory()
    requests = [request_factory(p, max_tokens=3) for p in PROMPTS[1:4]]
    decoder = engine._runner._decoder
    logits = decoder.logits

    def broken(hidden, *rest):
        result = logits(hidden, *rest).clone()
        if len(result) == 3:
            result[1] = float("nan")
        return result

    monkeypatch.setattr(decoder, "logits", broken)
    answers = run(engine, requests)
    assert [a.end.reason for a in answers] == ["length", "error", "length"]
    assert answers[1].end.error_code == "sampling_failed"


def test_a_failed_step_ends_what_runs_and_the_engine_goes_on(
    engine_factory, request_factory, monkeypatch, run
):
    engine = engine_factory()
    decoder = engine._runner._decoder
    with monkeypatch.context() as patch:
        patch.setattr(decoder, "forward", lambda *_: 1 / 0)
        answers = run(engine, [request_factory(p) for p in PROMPTS])
        assert {a.end.error_code for a in answers} == {"engine_unavailable"}
        assert "ZeroDivisionError" in answers[0].end.error
        assert not engine.broken
        for _ in range(MAX_FAILED_STEPS):
            run(engine, [request_factory(PROMPTS[0])])
        assert engine.broken
    (answer,) = run(engine, [request_factory(PROMPTS[0])])
    assert answer.end.reason == "length"
    assert not engine.broken


def test_a_rotten_adapter_fails_its_requests_and_is_quarantined(
    engine_factory, request_factory, adapter_factory, run
):
    engine = engine_factory()
    rotten, good = adapter_factory(4, 20), adapter_factory(4, 21)
    weights = Path(rotten.path) / "adapter_model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x40
    weights.write_bytes(content)
    answers = run(
        engine,
        [request_factory(PROMPTS[2], adapter=a) for a in (rotten, good, None)],
    )
    assert [a.end.reason for a in answers] == ["error", "length", "length"]
    assert answers[0].end.error_code == "adapter_corrupt"
    assert engine.status().quarantined == (rotten.digest,)
    refused = engine.submit(request_factory(PROMPTS[2], adapter=rotten))
    assert refused.code == "invalid_adapter"


def test_a_retired_adapter_is_unloaded_after_its_last_sequence(
    engine_factory, request_factory, adapter_factory
):
    engine = engine_factory()
    source = adapter_factory(4, 30)
    engine.submit(request_factory(PROMPTS[1], adapter=source, max_tokens=5))
    tokens = []
    while engine.has_work:
        events = engine.step()
        tokens += [e for e in events if isinstance(e, Tokens)]
        if tokens:
            engine.retire(source.digest)
    assert len(tokens) == 5
    assert engine.snapshot().adapters == ()


def test_more_adapters_than_fit_all_get_their_turn(
    engine_factory, request_factory, adapter_factory, run
):
    sources = [adapter_factory(8, 40 + i) for i in range(6)]
    one = engine_factory()
    run(one, [request_factory(PROMPTS[1], adapter=sources[0])])
    needed = one.snapshot().adapters[0].bytes
    engine = engine_factory(adapter_memory=int(2.5 * needed))
    answers = run(engine, [request_factory(PROMPTS[1], adapter=s) for s in (*sources, None)])
    assert {a.end.reason for a in answers} == {"length"}
    assert engine.status().resident_adapters <= 2
