"""The engine with drafters of all kinds, right and wrong: the texts are those without drafts.

Every draft is of a scripted drafter that knows the text without drafts, so what is accepted is
known. Engines run the tiny Llama in fp32; texts are compared token by token.
"""

import itertools

import msgspec
import numpy as np
import pytest
import torch

from polyloom.kvcache.errors import BlockAccountingError
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.speculation.ngram import NgramDrafter
from polyloom.routing.request import CacheOwner, CacheScope

BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4
PROMPTS = [
    tuple(int(t) for t in np.random.default_rng(n).integers(3, 512, n)) for n in (2, 15, 16, 17, 40)
]
SAMPLED = {"temperature": 1.0, "top_p": 0.95}


def drafting(request, drafts):
    return msgspec.structs.replace(request, drafts=drafts)


class Known:
    """Texts without drafts, and drafts made of them."""

    def __init__(self, requests, answers):
        texts = zip(requests, answers, strict=True)
        self._texts = [[*request.prompt, *answer.token_ids] for request, answer in texts]
        self._rng = np.random.default_rng(0)

    def right(self, tokens, length):
        for text in self._texts:
            if text[: len(tokens)] == list(tokens):
                return text[len(tokens) :][:length]
        return []

    def wrong(self, tokens, length):
        return [(token + 1) % 512 for token in self.right(tokens, length)]

    def mixed(self, tokens, length):
        """Of any length, right up to somewhere."""
        draft = self.right(tokens, int(self._rng.integers(0, length + 1)))
        place = int(self._rng.integers(0, length + 1))
        if place < len(draft):
            draft[place] = (draft[place] + 1) % 512
        return draft

    def on_and_off(self, tokens, length):
        """Three tokens, then nothing for a while, then three again."""
        return self.right(tokens, 3) if len(tokens) // 6 % 2 else []


@pytest.fixture(scope="module")
def shared(settings_factory):
    """One engine for all tests that need no other: each gives it its own drafters."""
    engine = build_engine(settings_factory())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def texts(shared, run, speculate):
    """Answers without drafts."""
    return lambda requests: run(
        speculate(shared), [drafting(request, "off") for request in requests]
    )


def token_ids(answers):
    return [answer.token_ids for answer in answers]


def sums(answers):
    ends = [answer.end for answer in answers]
    return sum(end.accepted_tokens for end in ends), sum(end.rejected_tokens for end in ends)


@pytest.fixture
def requests_of(request_factory):
    """One request a prompt, greedy and sampled in turn."""

    def make(max_tokens=24, **options):
        return [
            request_factory(
                prompt, max_tokens=max_tokens, seed=i, **(SAMPLED if i % 2 else {}), **options
            )
            for i, prompt in enumerate(PROMPTS)
        ]

    return make


@pytest.mark.parametrize("script", ["right", "wrong", "mixed", "on_and_off"])
@pytest.mark.parametrize("drafts", ["adaptive", 5])
def test_one_seed_gives_one_text_whatever_is_drafted(
    shared, requests_of, run, texts, scripted, speculate, script, drafts
):
    wanted = texts(requests_of())
    known = Known(requests_of(), wanted)
    engine = speculate(shared, scripted(getattr(known, script)))
    answers = run(engine, [drafting(request, drafts) for request in requests_of()])
    assert token_ids(answers) == token_ids(wanted)
    accepted, rejected = sums(answers)
    assert (script == "wrong") or accepted > 0
    assert (script == "right") or drafts == "latency" or rejected + accepted > 0
    assert script not in ("right", "on_and_off") or rejected == 0
    assert script != "wrong" or accepted == 0


@pytest.mark.parametrize(
    "options",
    [
        {"kv_memory": 9 * BLOCK_BYTES, "prefix_cache": False},
        {"token_budget": 7, "max_running": 2},
        {"implementation": "auto"},
    ],
    ids=["preempted", "chunked", "kernels"],
)
def test_one_seed_gives_one_text_preempted_and_chunked_with_drafts(
    engine_factory, requests_of, run, texts, scripted, speculate, options
):
    wanted = texts(requests_of())
    known = Known(requests_of(), wanted)
    engine = speculate(engine_factory(**options), scripted(known.mixed))
    answers = run(engine, [drafting(request, 4) for request in requests_of()])
    assert token_ids(answers) == token_ids(wanted)
    assert min(sums(answers)) > 0
    if "kv_memory" in options:
        assert sum(answer.end.timings.preemptions for answer in answers) > 0


def test_the_request_s_own_text_is_drafted_from(shared, speculate, request_factory, run, texts):
    """The tiny model falls into a loop, which an n-gram draft follows."""
    requests = [request_factory(prompt, max_tokens=80) for prompt in PROMPTS]
    engine = speculate(shared, NgramDrafter())
    answers = run(engine, [drafting(request, 8) for request in requests])
    again = [msgspec.structs.replace(r, sequence_id=f"again-{r.sequence_id}") for r in requests]
    assert token_ids(answers) == token_ids(texts(again))
    assert sums(answers)[0] > 50


def test_logprobs_are_those_without_drafts_one_a_token(
    shared, requests_of, run, texts, scripted, speculate
):
    wanted = texts(requests_of(logprobs=2))
    known = Known(requests_of(), wanted)
    engine = speculate(shared, scripted(known.mixed))
    answers = run(engine, [drafting(request, 5) for request in requests_of(logprobs=2)])
    for answer, reference in zip(answers, wanted, strict=True):
        assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
        for entry, other in zip(answer.logprobs, reference.logprobs, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [t.token_id for t in entry.top] == [t.token_id for t in other.top]


def test_teacher_forcing_gives_every_logprob(
    shared, requests_of, request_factory, run, texts, scripted, speculate
):
    """The whole text as a prompt, in other shapes and without drafts."""
    known = Known(requests_of(), texts(requests_of()))
    engine = speculate(shared, scripted(known.mixed))
    answers = run(engine, [drafting(request, 5) for request in requests_of(logprobs=0)])
    assert min(sums(answers)) > 0
    forced = run(
        engine,
        [
            request_factory((*prompt, *answer.token_ids), max_tokens=1, prompt_logprobs=0)
            for prompt, answer in zip(PROMPTS, answers, strict=True)
        ],
    )
    for answer, reference in zip(answers, forced, strict=True):
        wanted = reference.prompt_logprobs[-len(answer.token_ids) :]
        assert [entry.token_id for entry in wanted] == answer.token_ids
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(
            [entry.logprob for entry in wanted], abs=1e-5
        )


@pytest.mark.parametrize("max_tokens", range(1, 7))
def test_max_tokens_around_the_length_of_a_draft(
    shared, request_factory, run, texts, scripted, speculate, max_tokens
):
    def request(tokens):
        return request_factory(PROMPTS[2], max_tokens=tokens)

    full = request(12)
    known = Known([full], texts([full]))
    engine = speculate(shared, scripted(known.right))
    (answer,) = run(engine, [drafting(request(max_tokens), 4)])
    assert answer.token_ids == known.right(PROMPTS[2], max_tokens)
    assert (answer.end.reason, answer.end.completion_tokens) == ("length", max_tokens)


@pytest.mark.parametrize("place", range(1, 6))
@pytest.mark.parametrize("more", [0, 8])
def test_a_stop_token_inside_a_draft_ends_everything(
    shared, request_factory, run, texts, scripted, speculate, place, more
):
    """Nothing after it is in the text, the usage or the logprobs; stop wins over length."""
    full = request_factory(PROMPTS[3], max_tokens=8, seed=5, temperature=1.0)
    known = Known([full], texts([full]))
    right = known.right(PROMPTS[3], 8)
    stop = right[place]
    place = right.index(stop)
    engine = speculate(shared, scripted(known.right))
    request = request_factory(
        PROMPTS[3],
        max_tokens=place + 1 + more,
        seed=5,
        temperature=1.0,
        stop_token_ids=(stop,),
        logprobs=0,
    )
    (answer,) = run(engine, [drafting(request, 7)])
    assert answer.token_ids == right[:place]
    assert [entry.token_id for entry in answer.logprobs] == right[:place]
    end = answer.end
    assert (end.reason, end.stop_token, end.completion_tokens) == ("stop", stop, place + 1)


def keys_and_values(engine, sequence_id, num_tokens):
    """`[2, layers, heads, tokens, head_dim]` of a running sequence; the reference's layout."""
    storage, blocks = engine._runner._attention._storage, engine._blocks.blocks(sequence_id)
    pages = torch.stack([storage.keys[:, list(blocks)], storage.values[:, list(blocks)]])
    return pages.transpose(2, 3).flatten(3, 4)[:, :, :, :num_tokens]


def test_rejected_drafts_leave_the_cache_as_a_fresh_prefill_does(
    engine_factory, shared, request_factory, texts, scripted, speculate
):
    full = request_factory(PROMPTS[4], max_tokens=60)
    known = Known([full], texts([full]))
    engine = speculate(shared, scripted(known.wrong))
    request = drafting(request_factory(PROMPTS[4], max_tokens=60), 6)
    engine.submit(request)
    for _ in range(39):  # the next drafts would need a block more
        engine.step()
    sequence = engine._batcher.get(request.sequence_id)
    computed = sequence.computed
    assert computed == len(PROMPTS[4]) + 38
    assert len(engine._blocks.blocks(request.sequence_id)) == -(-computed // 16)
    fresh = engine_factory(token_budget=128)
    prefill = request_factory(tuple(sequence.tokens), max_tokens=4)
    fresh.submit(prefill)
    fresh.step()
    mine = keys_and_values(engine, request.sequence_id, computed)
    engine.abort(request.sequence_id)
    assert torch.allclose(mine, keys_and_values(fresh, prefill.sequence_id, computed), atol=1e-5)


def test_a_shared_block_holds_verified_tokens_only(
    shared, request_factory, run, texts, scripted, speculate
):
    """After a request whose drafts were all wrong, one that goes on from its text reuses its blocks
    and answers like a cold one."""
    scope = CacheScope(owner=CacheOwner("tenant", "mine"), tokenizer_digest="sha256:tokenizer")
    full = request_factory(PROMPTS[4], max_tokens=60)
    known = Known([full], texts([full]))
    engine = speculate(shared, scripted(known.wrong))
    request = request_factory(PROMPTS[4], max_tokens=60, cache=scope)
    (answer,) = run(engine, [drafting(request, 6)])
    assert answer.end.rejected_tokens > 100
    longer = (*PROMPTS[4], *answer.token_ids, 7)
    (warm,) = run(engine, [request_factory(longer, max_tokens=20, cache=scope)])
    assert warm.end.cached_tokens >= 96
    assert warm.token_ids == texts([request_factory(longer, max_tokens=20)])[0].token_ids


def test_chunk_edges_with_drafts(engine_factory, request_factory, run, texts, scripted, speculate):
    engine = engine_factory(token_budget=16, max_running=1)
    for length in (15, 16, 17, 31, 32, 33):
        prompt = tuple(range(3, 3 + length))
        full, request = (
            request_factory(prompt, max_tokens=20, seed=3, temperature=1.0) for _ in range(2)
        )
        known = Known([full], texts([full]))
        (answer,) = run(speculate(engine, scripted(known.mixed)), [drafting(request, 5)])
        assert answer.token_ids == known.right(prompt, 20)


def test_mixes_of_revisions_and_draft_lengths_equal_each_alone(
    engine_factory, request_factory, run, texts, scripted, speculate, adapter_factory
):
    sources = [None, adapter_factory(4, 0), adapter_factory(20, 1)]
    mix = list(itertools.product(PROMPTS[1:4], sources, ["off", "adaptive", 1, 6]))
    order = np.random.default_rng(1).permutation(len(mix))

    def requests():
        return [
            drafting(request_factory(prompt, adapter=source, max_tokens=12), drafts)
            for prompt, source, drafts in (mix[i] for i in order)
        ]

    wanted = [texts([request])[0] for request in requests()]
    known = Known(requests(), wanted)
    engine = speculate(engine_factory(max_running=36), scripted(known.mixed))
    answers = run(engine, requests())
    assert token_ids(answers) == token_ids(wanted)
    assert min(sums(answers)) > 0
    for request, answer in zip(requests(), answers, strict=True):
        if request.drafts == "off":
            assert sums([answer]) == (0, 0)


def plans_of(engine, monkeypatch):
    """Every plan that the engine runs, as it comes."""
    plans, runner = [], engine._runner.run

    def run(plan):
        plans.append(plan)
        return runner(plan)

    monkeypatch.setattr(engine._runner, "run", run)
    return plans


def test_a_step_with_a_prompt_in_it_has_no_draft(
    engine_factory, request_factory, texts, scripted, speculate, monkeypatch
):
    full = request_factory(PROMPTS[1], max_tokens=40)
    known = Known([full], texts([full]))
    engine = speculate(engine_factory(token_budget=16, max_running=4), scripted(known.right))
    plans = plans_of(engine, monkeypatch)
    engine.submit(drafting(request_factory(PROMPTS[1], max_tokens=40), 2))
    while engine.has_work:
        if len(plans) == 5:
            engine.submit(request_factory(tuple(range(3, 103)), max_tokens=2))
        engine.step()
    both = [plan for plan in plans if not all(item.decodes for item in plan.scheduled)]
    assert len(both) > 6
    assert not any(item.draft for plan in both for item in plan.scheduled)
    assert any(item.draft for plan in plans for item in plan.scheduled)


def test_drafts_get_no_more_than_the_budget_leaves(
    engine_factory, requests_of, run, texts, scripted, speculate, monkeypatch
):
    known = Known(requests_of(), texts(requests_of()))
    engine = speculate(engine_factory(token_budget=8, max_running=5), scripted(known.right))
    plans = plans_of(engine, monkeypatch)
    run(engine, [drafting(request, 9) for request in requests_of()])
    assert max(plan.num_tokens for plan in plans) == 8


def test_drafts_preempt_nobody(engine_factory, requests_of, run, texts, scripted, speculate):
    """With so few blocks that sequences take each other's, wrong drafts cost no further one."""
    known = Known(requests_of(), texts(requests_of()))
    preemptions = []
    for drafts in ("off", 9):
        engine = engine_factory(kv_memory=9 * BLOCK_BYTES, prefix_cache=False)
        speculate(engine, scripted(known.wrong))
        run(engine, [drafting(request, drafts) for request in requests_of()])
        preemptions.append(engine._batcher.preemptions_total)
    assert preemptions[0] == preemptions[1] > 0


def test_rejected_drafts_are_charged_to_their_tenant(
    shared, request_factory, run, texts, scripted, speculate
):
    full = request_factory(PROMPTS[1], max_tokens=20)
    known = Known([full], texts([full]))
    served = []
    for drafts in ("off", 3):
        engine = speculate(shared, scripted(known.wrong))
        (answer,) = run(engine, [drafting(request_factory(PROMPTS[1], max_tokens=20), drafts)])
        served.append(engine._batcher._waiting.shares.tenants["tenant"])
    assert served[1] == served[0] + answer.end.rejected_tokens


def test_the_report_adds_up_and_nothing_is_left_of_a_sequence(
    shared, requests_of, run, texts, scripted, speculate
):
    known = Known(requests_of(), texts(requests_of()))
    drafter = scripted(known.mixed)
    engine = speculate(shared, drafter)
    requests = [msgspec.structs.replace(r, domain="code") for r in requests_of()]
    answers = run(engine, [drafting(request, 5) for request in requests])
    accepted, rejected = sums(answers)
    report = engine.speculation_report()
    assert {line.temperature for line in report.lines} == {"greedy", "medium"}
    assert sum(line.accepted for line in report.lines) == accepted
    assert sum(line.drafted for line in report.lines) == accepted + rejected
    for line in report.lines:
        assert (line.revision, line.drafter, line.domain) == (None, "scripted", "code")
        assert sum(line.proposals_by_length) == sum(line.accepted_lengths) == line.steps
        assert sum(line.accepted_by_position) == line.accepted
        assert list(line.accepted_by_position) == sorted(line.accepted_by_position, reverse=True)
        assert 0 <= line.rejected_seconds <= line.draft_seconds + line.verify_seconds
    assert 0 < report.controller_seconds < report.step_seconds
    assert sorted(drafter.closed) == sorted(request.sequence_id for request in requests)
    speculator = engine._speculator
    assert not (
        speculator._followed or speculator._hidden or speculator._controller.acceptance._standings
    )


def test_committed_tokens_cannot_be_taken_back(engine_factory, request_factory):
    """What the cache shares is final: verification must come before it."""
    scope = CacheScope(owner=CacheOwner("tenant", "mine"), tokenizer_digest="sha256:tokenizer")
    engine = engine_factory()
    request = request_factory(PROMPTS[4], max_tokens=4, cache=scope)
    engine.submit(request)
    engine.step()
    with pytest.raises(BlockAccountingError):
        engine._blocks.truncate(request.sequence_id, 8)
    engine.abort(request.sequence_id)
