"""A draft model on the tiny Llama: another random one, and the base itself."""

import json
import shutil

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.errors import EngineStartError
from polyloom.platform.engine.speculation.draft_model import CATCH_UP
from polyloom.platform.engine.speculation.drafter import DraftRow

PROMPTS = [tuple(int(t) for t in np.random.default_rng(n).integers(3, 512, n)) for n in (3, 17, 40)]


@pytest.fixture(scope="module")
def other_folder(tiny_llama_folder, tmp_path_factory):
    """A smaller random model of the same tokenizer."""
    folder = tmp_path_factory.mktemp("draft")
    shutil.copytree(tiny_llama_folder, folder, dirs_exist_ok=True)
    torch.manual_seed(1)
    config = LlamaConfig.from_pretrained(tiny_llama_folder)
    config.num_hidden_layers = 1
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine_of(settings_factory):
    """Engines by draft model's folder, built once."""
    engines = {}

    def engine(folder, **options):
        key = (folder, *options.items())
        if key not in engines:
            settings = settings_factory(drafters=(), draft_model=str(folder), **options)
            engines[key] = build_engine(settings)
        return engines[key]

    yield engine
    for built in engines.values():
        built.close()


def drafter_of(engine):
    return engine._speculator._drafters[0]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_texts_are_the_target_s_and_its_own_copy_is_always_right(
    engine_of, tiny_llama_folder, other_folder, request_factory, run, sampling
):
    """One that drafts with the same noise from the same law is accepted, sampled or not."""
    for folder in (tiny_llama_folder, other_folder):
        engine = engine_of(folder)
        texts = {}
        for drafts in ("off", 3):
            requests = [
                msgspec.structs.replace(
                    request_factory(prompt, max_tokens=21, seed=i, **sampling), drafts=drafts
                )
                for i, prompt in enumerate(PROMPTS)
            ]
            answers = run(engine, requests)
            texts[drafts] = [answer.token_ids for answer in answers]
        assert texts["off"] == texts[3]
        accepted = sum(answer.end.accepted_tokens for answer in answers)
        rejected = sum(answer.end.rejected_tokens for answer in answers)
        if folder == tiny_llama_folder:
            assert rejected == 0 and accepted > 30
        else:
            assert rejected > 0
        blocks = drafter_of(engine)._model.blocks
        assert blocks.num_free_blocks == blocks.num_blocks
        assert not drafter_of(engine)._cached


def test_a_proposal_depends_on_the_sequence_alone(engine_of, other_folder, decoding):
    """After a gap, after wrong drafts, twice in one step, and after its cache was lost: as afresh."""
    drafter = drafter_of(engine_of(other_folder))
    tokens = [int(t) for t in np.random.default_rng(8).integers(3, 512, 40)]

    def draft(sequence, length=3):
        [proposal] = drafter.propose([DraftRow(sequence, length)])
        return proposal.tokens

    def afresh(count):
        sequence = decoding(tokens[:5], tokens[5:count])
        found = draft(sequence)
        drafter.close(sequence.sequence_id)
        return found

    sequence = decoding(tokens[:5], tokens[5:8])
    for count in (8, 9, 10, 14, 30):  # grows by one, by a part of a draft, by a gap without drafts
        sequence.tokens = tokens[:count]
        assert draft(sequence) == afresh(count)
        assert draft(sequence) == afresh(count)
    sequence.tokens = [*tokens[:30], *draft(sequence), 7]
    expected = decoding(sequence.tokens[:5], sequence.tokens[5:])
    assert draft(sequence) == draft(expected)
    drafter.close(sequence.sequence_id)
    assert draft(sequence) == draft(expected)
    for each in (sequence, expected):
        drafter.close(each.sequence_id)


def test_drafts_are_the_same_after_steps_without_any(
    engine_of, other_folder, request_factory, run, monkeypatch
):
    """Length 3, then 0 for a while, then 3 again: no draft differs from those of no pause."""
    engine = engine_of(other_folder)
    drafter, extend, steps = drafter_of(engine), engine._speculator.extend, []
    propose, drafts = drafter.propose, {}

    def noted(rows):
        proposals = propose(rows)
        for row, proposal in zip(rows, proposals, strict=True):
            drafts[row.sequence.output_len] = proposal.tokens
        return proposals

    def paused(plan):
        steps.append(plan)
        return plan if 6 <= len(steps) < 14 else extend(plan)

    def answer():
        drafts.clear()
        request = request_factory(PROMPTS[1], max_tokens=40)
        (ended,) = run(engine, [msgspec.structs.replace(request, drafts=3)])
        return ended.token_ids, dict(drafts)

    monkeypatch.setattr(drafter, "propose", noted)
    text, throughout = answer()
    monkeypatch.setattr(engine._speculator, "extend", paused)
    again, toggled = answer()
    assert again == text
    assert len(toggled) < len(throughout)
    common = throughout.keys() & toggled.keys()
    assert max(common) > 20
    assert {place: throughout[place] for place in common} == {p: toggled[p] for p in common}


def test_a_long_prompt_is_caught_up_with_in_parts(engine_of, other_folder, decoding):
    drafter = drafter_of(engine_of(other_folder))
    prompt = [3 + i % 500 for i in range(2 * CATCH_UP + 10)]
    sequence = decoding(prompt, [5])
    lengths = [len(drafter.propose([DraftRow(sequence, 2)])[0].tokens) for _ in range(4)]
    assert lengths == [0, 0, 2, 2]
    drafter.close(sequence.sequence_id)


def test_without_blocks_there_is_no_draft_and_nothing_is_held(
    engine_of, other_folder, decoding, request_factory, run
):
    engine = engine_of(other_folder, kv_memory=60 * 1024)  # ten blocks; seven for the draft model
    drafter = drafter_of(engine)
    long = decoding(range(3, 150), [5])
    [proposal] = drafter.propose([DraftRow(long, 3)])
    assert proposal.tokens == ()
    assert drafter._model.blocks.num_free_blocks == drafter._model.blocks.num_blocks


def test_another_tokenizer_is_refused_by_name(settings_factory, other_folder, tmp_path):
    folder = tmp_path / "stranger"
    shutil.copytree(other_folder, folder)
    path = folder / "tokenizer.json"
    described = json.loads(path.read_text())
    described["added_tokens"] = described["added_tokens"][:-1]
    path.write_text(json.dumps(described))
    with pytest.raises(EngineStartError, match=r"stranger.*another tokenizer.*added_tokens"):
        build_engine(settings_factory(draft_model=str(folder)))
    path.unlink()
    with pytest.raises(EngineStartError, match=r"tokenizer.json cannot be read"):
        build_engine(settings_factory(draft_model=str(folder)))
