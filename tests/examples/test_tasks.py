import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from examples.brand_voice import VOICES
from examples.tasks import TASKS, check, held_out, passed, training
from examples.text_to_sql import FIXTURES, rows

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
MEGABYTE = 1_000_000


@pytest.mark.parametrize("task", TASKS)
def test_reference_answers_keep_every_rule(task: str) -> None:
    for case in [*held_out(task), *training(task)[:40]]:
        assert passed(task, case.expected, case), case


@pytest.mark.parametrize("task", TASKS)
def test_no_slot_value_of_a_held_out_case_occurs_in_training(task: str) -> None:
    seen = {slot for case in training(task) for slot in case.slots}
    for case in held_out(task):
        # A greeting carries nothing that the answer depends on, yet it is new too.
        assert not seen & set(case.slots)


@pytest.mark.parametrize("task", TASKS)
def test_no_held_out_name_occurs_as_a_word_in_training(task: str) -> None:
    sentence_slots = {"problem", "urgency", "greeting", "phrasing", "question"}
    names = {v for case in held_out(task) for k, v in case.slots if k not in sentence_slots}
    text = " ".join(case.messages[-1]["content"] for case in training(task))
    assert names
    assert not [name for name in names if re.search(rf"\b{re.escape(name)}\b", text)]


@pytest.mark.parametrize("task", TASKS)
def test_cases_are_different_and_the_same_each_time(task: str) -> None:
    cases = held_out(task)
    assert len({case.slots for case in cases}) == len(cases) == TASKS[task].held_out_cases
    assert cases == held_out(task)
    assert training(task) == training(task)


def test_a_ticket_has_to_be_json_with_exactly_the_fields() -> None:
    case = held_out("support-tickets")[0]
    ticket = json.loads(case.expected)
    task = "support-tickets"
    assert passed(task, f"```json\n{json.dumps(ticket, indent=2)}\n```", case)
    assert not any(check(task, "The ticket is done.", case).values())
    assert not any(check(task, "[1]", case).values())
    assert not check(task, json.dumps({**ticket, "note": ""}), case)["json"]
    wrong = check(task, json.dumps({**ticket, "product": "Cobalt Lamp"}), case)
    assert wrong == {"json": True, "category": True, "priority": True, "product": False}


def test_sql_is_judged_by_its_rows_alone() -> None:
    case = next(c for c in held_out("text-to-sql") if "MAX(amount)" in c.expected)
    product = case.slot("product")
    same = f"SELECT amount FROM orders WHERE product = '{product}' ORDER BY amount DESC LIMIT 1"
    assert passed("text-to-sql", same, case)
    assert passed("text-to-sql", f"```sql\n{case.expected}\n```", case)
    other = case.expected.replace("MAX", "MIN")
    assert check("text-to-sql", other, case) == {"runs": True, "rows": False}


@pytest.mark.parametrize(
    "query",
    [
        "",
        "I do not know.",
        "DELETE FROM orders",
        "SELECT 1; SELECT 2",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
    ],
)
def test_hostile_or_senseless_sql_only_fails(query: str) -> None:
    case = held_out("text-to-sql")[0]
    assert not check("text-to-sql", query, case)["rows"]


def test_every_reference_query_has_a_telling_result() -> None:
    for case in held_out("text-to-sql"):
        results = [rows(case.expected, seed) for seed in FIXTURES]
        for result in results:
            assert result
            assert not {None, 0} & {value for row in result for value in row}, case.expected


def test_queries_with_other_values_have_other_results() -> None:
    queries = {case.expected for case in held_out("text-to-sql")}
    results: dict[tuple[frozenset[object], ...], str] = {}
    for query in queries:
        result = tuple(frozenset((rows(query, seed) or {}).items()) for seed in FIXTURES)
        assert result not in results, f"{query} looks like {results.get(result)}"
        results[result] = query


@pytest.mark.parametrize("revision", VOICES)
def test_a_voice_has_rules_that_can_be_broken_one_by_one(revision: str) -> None:
    task, voice = f"brand-voice-{revision}", VOICES[revision]
    case = held_out(task)[0]
    good = case.expected
    item = f"{case.slot('material')} {case.slot('thing')}"
    broken = {
        "greeting": good.replace(voice.greeting, "Hello."),
        "sign-off": good.replace(voice.sign_off, "Bye, Fernhill Coffee"),
        "brand": good.replace("Fernhill Coffee", "Fernhill"),
        "topic": good.replace(item, "things"),
        "tone": good.replace("!", ".") if voice.exclaims else good.replace(item, f"{item}!"),
    }
    for rule, answer in broken.items():
        assert not check(task, answer, case)[rule]


def test_the_two_voices_answer_the_same_questions_and_exclude_each_other() -> None:
    first, second = held_out("brand-voice-v1"), held_out("brand-voice-v2")
    assert [case.messages for case in first] == [case.messages for case in second]
    for one, two in zip(first, second, strict=True):
        assert not passed("brand-voice-v1", two.expected, one)
        assert not passed("brand-voice-v2", one.expected, two)


@pytest.mark.parametrize("task", TASKS)
def test_shipped_adapter_is_small_and_names_no_machine(task: str) -> None:
    folder = ADAPTERS / task
    assert {file.name for file in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 3 * MEGABYTE
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as tensors:
        names = tensors.keys()
        assert {tensors.get_slice(name).get_dtype() for name in names} == {"BF16"}


def test_shipped_adapters_differ_in_shape() -> None:
    configs = [json.loads((ADAPTERS / task / "adapter_config.json").read_text()) for task in TASKS]
    assert len({(c["r"], c["use_rslora"], *sorted(c["target_modules"])) for c in configs}) == 4
