"""Drafts for constrained sequences: the texts are those without drafts, in fewer steps."""

import json

import msgspec
import pytest

from polyloom.platform.engine.speculation.drafter import Proposal
from polyloom.platform.engine.speculation.speculator import Speculator
from polyloom.platform.engine.structured.drafter import FittingDrafter, GrammarDrafter

PROMPT = (5, 6, 7)
LONG_KEYS = json.dumps(
    {
        "type": "object",
        "properties": {
            f"{name}_of_the_customer": {"type": "string", "maxLength": 3}
            for name in ("name", "city")
        },
        "required": ["name_of_the_customer", "city_of_the_customer"],
        "additionalProperties": False,
    }
)


class Scripted:
    """Proposes what a function of a sequence's output and the wanted length says."""

    name, needs_hidden, looks_up = "scripted", False, True

    def __init__(self, script) -> None:
        self._script = script

    def serves(self, sequence) -> bool:
        return True

    def propose(self, rows):
        drafts = [
            tuple(self._script(r.sequence.tokens[r.sequence.prompt_len :], r.length)) for r in rows
        ]
        return [Proposal(draft, (0.9,) * len(draft)) for draft in drafts]

    def close(self, sequence_id) -> None:
        pass


def with_drafters(engine, *drafters):
    budget = engine._batcher.config.token_budget
    engine._speculator = Speculator(drafters, engine._blocks, budget)
    return engine


@pytest.fixture
def requests_of(request_factory, make_grammar):
    def make(drafts, text=LONG_KEYS):
        grammar = make_grammar("json_schema", text)
        return [
            msgspec.structs.replace(
                request_factory(PROMPT, max_tokens=80, grammar=grammar, seed=n, temperature=1.0),
                drafts=drafts,
            )
            for n in range(3)
        ]

    return make


def told(answers):
    return [(a.token_ids, a.end.reason, a.end.completion_tokens, a.end.stop_token) for a in answers]


def test_forced_tokens_come_in_few_steps(engine_factory, requests_of, run, tokenizer) -> None:
    engine = engine_factory(drafters=("grammar",))
    wanted = run(engine, requests_of("off"))
    plain = engine.counters.steps
    answers = run(engine, requests_of(16))
    assert told(answers) == told(wanted)
    assert sum(answer.end.accepted_tokens for answer in answers) > 20
    assert all(answer.end.rejected_tokens == 0 for answer in answers)
    assert engine.counters.steps - plain < plain / 2
    for answer in answers:
        json.loads(tokenizer.decode(answer.token_ids))


def test_the_controller_keeps_them_on(engine_factory, requests_of, run) -> None:
    engine = engine_factory(drafters=("grammar",))
    answers = run(engine, requests_of("adaptive"))
    assert sum(answer.end.accepted_tokens for answer in answers) > 0
    assert all(answer.end.rejected_tokens == 0 for answer in answers)


@pytest.mark.parametrize("fitted", [True, False])
def test_a_grammar_that_ends_inside_a_draft(engine_factory, requests_of, run, fitted) -> None:
    """The drafts are the right texts, each with more behind its end, and other texts' tokens."""
    engine = engine_factory(drafters=())
    wanted = run(engine, requests_of("off"))

    def script(output, length):
        for answer in wanted:
            if answer.token_ids[: len(output)] == output:
                return [*answer.token_ids[len(output) :], 2, 9, 9][:length]
        return [9]

    drafter = Scripted(script)
    if fitted:
        drafter = FittingDrafter(drafter, engine._grammars)
    answers = run(with_drafters(engine, drafter), requests_of(16))
    assert told(answers) == told(wanted)
    assert sum(answer.end.accepted_tokens for answer in answers) > 0


def test_wrong_drafts_leave_no_trace(engine_factory, requests_of, run) -> None:
    engine = engine_factory(drafters=())
    wanted = run(engine, requests_of("off"))
    wrong = Scripted(lambda output, length: [len(output) % 512] * length)
    answers = run(with_drafters(engine, wrong, GrammarDrafter(engine._grammars)), requests_of(5))
    assert told(answers) == told(wanted)


def test_only_what_fits_is_verified(engine_factory, requests_of, run) -> None:
    engine = engine_factory(drafters=())
    junk = Scripted(lambda output, length: [3] * length)
    answers = run(with_drafters(engine, FittingDrafter(junk, engine._grammars)), requests_of(5))
    unfitted = run(with_drafters(engine, junk), requests_of(5))
    rejected = [sum(a.end.rejected_tokens for a in some) for some in (answers, unfitted)]
    assert rejected[0] < rejected[1] / 2
