"""The controller on a simulated machine: what it learns, what it chooses, what probing costs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyloom.platform.engine.speculation.acceptance import AcceptanceModel, temperature_band
from polyloom.platform.engine.speculation.controller import Candidate, Controller, Load
from polyloom.platform.engine.speculation.costs import StepTimes
from polyloom.platform.engine.speculation.drafter import Proposal
from polyloom.platform.engine.speculation.lengths import best_lengths

ROOM = 400

chances = st.lists(st.floats(0.05, 1.0), max_size=4).map(
    lambda steps: list(itertools.accumulate(steps, lambda a, b: a * b))
)


@given(st.lists(chances, max_size=3), st.integers(0, 6), st.floats(0.0, 0.6))
def test_the_chosen_lengths_are_the_best_of_all(survivals, room, slope):
    def seconds(drafted):
        return 1.0 + slope * drafted

    def rate(lengths):
        expected = 3 + sum(sum(s[:n]) for s, n in zip(survivals, lengths, strict=True))
        return expected / seconds(sum(lengths))

    choice = best_lengths(survivals, 3, room, seconds)
    every = itertools.product(*(range(len(survival) + 1) for survival in survivals))
    best = max(rate(lengths) for lengths in every if sum(lengths) <= room)
    assert sum(choice.lengths) <= room
    assert rate(choice.lengths) == pytest.approx(best) == pytest.approx(choice.rate)


def machine(rows, drafted=0, slow=1.0):
    """Seconds of a simulated step: 20 ms, and little more up to 16 rows."""
    total = rows + drafted
    return slow * (0.02 + 0.0002 * total + 0.004 * max(0, total - 16) / 16)


def test_step_times_learn_the_machine_through_noise_and_follow_it_when_it_slows():
    times, rng = StepTimes(), np.random.default_rng(0)
    for _ in range(400):
        rows = int(rng.choice([1, 2, 4, 8, 16, 24, 32]))
        times.measured(rows, 100.0 * rows, machine(rows) * rng.lognormal(0, 0.1))
    for rows in (1, 3, 8, 16, 20, 32):
        assert times.predict(rows, 100.0 * rows) == pytest.approx(machine(rows), rel=0.1)
    for _ in range(40):  # only one row count is run while the machine is half as fast
        times.measured(8, 800.0, machine(8, slow=2.0))
    assert times.predict(1, 100.0) == pytest.approx(machine(1, slow=2.0), rel=0.25)
    times.measured(8, 800.0, 50.0)  # one step held up for a minute
    assert times.predict(8, 800.0) < 2 * machine(8, slow=2.0)


def test_step_times_learn_what_context_costs():
    times, rng = StepTimes(), np.random.default_rng(0)
    for _ in range(3000):
        attended = float(rng.integers(100, 8000))
        times.measured(1, attended, 0.02 + 2e-6 * attended)
    cheap, dear = times.predict(1, 1000.0), times.predict(1, 7000.0)
    assert dear - cheap == pytest.approx(2e-6 * 6000, rel=0.3)


def teach(model, sequence, trials, accepted_of_4, drafter="d", confidence=0.7):
    proposal = Proposal((1, 2, 3, 4), (confidence,) * 4)
    for _ in range(trials):
        model.verified(sequence, drafter, proposal, accepted_of_4, mismatch=accepted_of_4 < 4)


def test_acceptance_is_learned_by_kind_confidence_and_position(decoding):
    model = AcceptanceModel()
    code, chat = decoding(domain="code"), decoding(domain="chat")
    teach(model, code, 100, 4)
    teach(model, chat, 100, 1)
    sure = Proposal((1, 2, 3, 4), (0.7,) * 4)
    assert model.survival(code, "d", sure)[3] > 0.8
    first, *rest = model.survival(chat, "d", sure)
    assert first > 0.9
    assert sum(rest) < 0.1
    unsure = Proposal((1,), (0.1,))
    assert model.survival(code, "d", unsure)[0] < 0.6


def test_a_kind_with_few_samples_begins_where_its_drafter_stands(decoding):
    model = AcceptanceModel()
    teach(model, decoding(domain="a"), 200, 4)
    fresh = decoding(domain="new")
    [first, *_] = model.survival(fresh, "d", Proposal((1,), (0.7,)))
    assert first > 0.9
    teach(model, fresh, 30, 0)
    [first, *_] = model.survival(fresh, "d", Proposal((1,), (0.7,)))
    assert first < 0.2


def test_what_changes_is_noticed_within_a_hundred_drafts(decoding):
    model, sequence = AcceptanceModel(), decoding()
    teach(model, sequence, 300, 0)
    model.close(sequence.sequence_id, ["d"])
    teach(model, decoding(), 100, 4)
    assert model.survival(decoding(), "d", Proposal((1,), (0.7,)))[0] > 0.8


def test_what_is_expected_of_a_drafter_follows_each_of_its_trials(decoding):
    model, sequence, other = AcceptanceModel(), decoding(), decoding()
    before = model.expected_survival(sequence, "d", 4)
    teach(model, other, 50, 4, "another")
    assert model.expected_survival(sequence, "d", 4) == before
    teach(model, other, 50, 4)
    after = model.expected_survival(sequence, "d", 4)
    assert after[3] > before[3]
    assert len(model.expected_survival(sequence, "d", 2)) == 2


def test_temperatures_are_told_apart():
    assert [temperature_band(t) for t in (0.0, 0.5, 1.0, 1.1)] == [
        "greedy",
        "low",
        "medium",
        "high",
    ]


def test_a_drafter_that_often_has_nothing_is_expected_to_bring_little(decoding):
    """What it does propose is as good as before."""
    model, sequence = AcceptanceModel(), decoding()
    teach(model, sequence, 100, 4)
    drafted = Proposal((1, 2), (0.7, 0.7))
    good = model.survival(sequence, "d", drafted)
    assert model.expected_survival(sequence, "d", 2)[0] > 0.8
    for turn in range(100):
        model.asked(sequence, "d", proposed=turn % 4 == 0)
    assert 0.1 < model.expected_survival(sequence, "d", 2)[0] < 0.4
    assert model.survival(sequence, "d", drafted) == good


class World:
    """Steps of `rows` sequences on the simulated machine, each drafted token right with a chance."""

    def __init__(self, decoding, drafters, rows=1, *, drafts="adaptive", chance=0.0):
        self.controller = Controller(drafters)
        self.sequences = [decoding(drafts=drafts) for _ in range(rows)]
        self.chance = chance
        self.rng = np.random.default_rng(0)
        self.seconds = self.tokens = self.drafted = 0
        self.draft_cost = dict.fromkeys((d.name for d in drafters), 0.0)

    def candidate(self, sequence):
        return Candidate(sequence, 31, None, self.draft_cost)

    def step(self):
        rows = len(self.sequences)
        load = Load(rows, 100.0 * rows, ROOM)
        candidates = [self.candidate(sequence) for sequence in self.sequences]
        chosen = self.controller.choose(candidates, load)
        drafted = sum(len(guess.proposal.tokens) for guess in chosen.values())
        seconds = machine(rows, drafted) * self.rng.lognormal(0, 0.03)
        for sequence in self.sequences:
            guess = chosen.get(sequence.sequence_id)
            length = 0 if guess is None else len(guess.proposal.tokens)
            matched = 0
            while matched < length and self.rng.random() < self.chance:
                matched += 1
            if guess is not None:
                self.controller.acceptance.verified(
                    sequence, guess.drafter, guess.proposal, matched, mismatch=matched < length
                )
            self.tokens += matched + 1
        self.controller.ran(rows + drafted, 100.0 * (rows + drafted), seconds)
        self.seconds += seconds
        self.drafted += drafted
        return drafted

    def run(self, steps):
        self.seconds = self.tokens = self.drafted = 0
        for _ in range(steps):
            self.step()
        return self.tokens / self.seconds


def anything(tokens, length):
    return [1] * length


def test_right_drafts_are_verified_whole(decoding, scripted):
    world = World(decoding, [scripted(anything)], chance=0.98)
    world.run(300)
    assert world.run(100) > 8 / machine(1)


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 0.9])
def test_adaptive_is_close_to_the_best_fixed_length(decoding, scripted, chance):
    fixed = [
        World(decoding, [scripted(anything)], drafts=k, chance=chance).run(600)
        for k in (1, 2, 3, 4, 6, 8, 15, 31)
    ]
    world = World(decoding, [scripted(anything)], chance=chance)
    world.run(200)
    assert world.run(1000) > 0.95 * max(fixed)


@pytest.mark.parametrize("rows", [1, 32])
def test_a_random_drafter_costs_at_most_one_percent(decoding, scripted, rows):
    world = World(decoding, [scripted(anything)], rows, chance=0.0)
    world.run(100)
    rate = world.run(2000)
    assert rate > 0.99 * rows / machine(rows)
    assert world.drafted > 0, "it must go on probing"


@pytest.mark.parametrize(
    ("rows", "chance", "least", "most"),
    [(16, 0.0, 8, 40), (16, 0.95, 95, 100), (16, 0.1, 8, 60), (1, 0.1, 95, 100), (1, 0.0, 8, 60)],
)
def test_what_loses_in_a_large_batch_rests(decoding, scripted, rows, chance, least, most):
    """It is asked again now and then. In a small batch only what has no chance at all rests."""
    drafter = scripted(anything)
    world = World(decoding, [drafter], rows, chance=chance)
    world.run(300)
    before = drafter.asked
    world.run(100)
    assert least <= drafter.asked - before <= most


def test_a_fixed_length_is_asked_for_in_a_large_batch_too(decoding, scripted):
    drafter = scripted(anything)
    world = World(decoding, [drafter], 16, drafts=2, chance=0.0)
    world.run(100)
    assert drafter.asked == 100


def test_a_batch_drafts_less_than_one_alone(decoding, scripted):
    worlds = [World(decoding, [scripted(anything)], rows, chance=0.6) for rows in (1, 48)]
    for world in worlds:
        world.run(300)
    alone, batch = (world.drafted / 300 / len(world.sequences) for world in worlds)
    assert batch < alone


def test_a_slow_drafter_is_soon_left_alone_but_not_for_good(decoding, scripted):
    """Its time is charged by the clock: here it counts calls, each of a hundredth of a second."""
    slow = scripted(lambda tokens, length: [1] * length, looks_up=False)
    world = World(decoding, [slow], chance=0.5)
    controller = world.controller
    controller._token_times["scripted"].measured(1, 0.0, 0.05)
    ask = controller._token_times["scripted"]
    ask.measured = lambda *_: None  # type: ignore[method-assign]
    world.run(2000)
    assert 0 < slow.asked < 20


def test_a_baseline_is_measured_before_and_between_drafts(decoding, scripted):
    world = World(decoding, [scripted(anything)], chance=0.95)
    drafted = [world.step() for _ in range(600)]
    assert drafted[0] == 0
    assert 1 <= drafted[1:].count(0) <= 6


def test_a_change_of_workload_is_noticed(decoding, scripted):
    world = World(decoding, [scripted(anything)], chance=0.0)
    world.run(300)
    world.chance = 0.95
    for _ in range(3000):
        if world.step() >= 8:
            return
    pytest.fail("drafts pay again, and none are made")


def test_a_drafter_that_rests_is_considered_for_other_sequences(decoding, scripted):
    model = scripted(anything, looks_up=False)
    world = World(decoding, [model], chance=0.0)
    world.run(400)
    world.controller._allowance = 0.0
    asked = model.asked
    fresh = decoding(domain="new")
    teach(world.controller.acceptance, fresh, 50, 4, "scripted")
    world.controller.choose([world.candidate(fresh)], Load(1, 100.0, ROOM))
    assert model.asked == asked + 1


@pytest.mark.parametrize(("policy", "length"), [("latency", 5), (5, 5), (1, 1)])
def test_policies(decoding, scripted, policy, length):
    world = World(decoding, [scripted(anything)], drafts=policy, chance=0.9)
    lengths = [world.step() for _ in range(100)][20:]
    if policy == "latency":
        assert np.mean(lengths) >= length
    else:
        assert set(lengths) == {length}


def test_the_better_of_two_drafters_is_asked(decoding, scripted):
    good = scripted(lambda tokens, length: [1] * length, name="good", looks_up=False)
    bad = scripted(lambda tokens, length: [2] * length, name="bad")
    world = World(decoding, [bad, good])
    sequence = world.sequences[0]
    teach(world.controller.acceptance, sequence, 50, 0, "bad", confidence=0.9)
    teach(world.controller.acceptance, sequence, 50, 4, "good", confidence=0.9)
    world.controller.ran(1, 100.0, machine(1))
    world.step()
    chosen = world.controller.choose([world.candidate(sequence)], Load(1, 100.0, ROOM))
    assert chosen[sequence.sequence_id].drafter == "good"


def test_a_drafter_that_pays_does_not_rest_because_a_lookup_had_better(decoding, scripted):
    found = [True]
    lookup = scripted(lambda tokens, length: [1] * length if found[0] else [], name="lookup")
    model = scripted(anything, name="model", looks_up=False)
    world = World(decoding, [lookup, model])
    sequence, controller = world.sequences[0], world.controller
    for name in ("lookup", "model"):
        teach(controller.acceptance, sequence, 50, 4, name, confidence=0.9)
    controller.ran(1, 100.0, machine(1))
    for _ in range(2):  # the first is the baseline
        controller.choose([world.candidate(sequence)], Load(1, 100.0, ROOM))
    asked, found[0], controller._allowance = model.asked, False, 0.0
    chosen = controller.choose([world.candidate(sequence)], Load(1, 100.0, ROOM))
    assert chosen[sequence.sequence_id].drafter == "model"
    assert model.asked == asked + 1
