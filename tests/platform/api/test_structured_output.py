"""Answers of a given shape, through a whole server and the official client."""

import json

import openai
import pytest

HELLO = [{"role": "user", "content": "Say hello"}]
TICKET = {
    "type": "object",
    "properties": {
        "category": {"enum": ["billing", "bug"]},
        "urgent": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["category", "urgent", "tags"],
    "additionalProperties": False,
}
AS_TICKET = {"type": "json_schema", "json_schema": {"name": "ticket", "schema": TICKET}}


def is_ticket(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"category", "urgent", "tags"}
        and value["category"] in ("billing", "bug")
        and isinstance(value["urgent"], bool)
        and set(value["tags"]) <= {"a", "b"}
    )


def test_every_choice_is_of_the_schema(tenant, base_name) -> None:
    answer = tenant.openai().chat.completions.create(
        model=base_name,
        messages=HELLO,
        response_format=AS_TICKET,
        n=4,
        seed=1,
        temperature=1.5,
        max_tokens=200,
    )
    assert all(is_ticket(choice.message.content) for choice in answer.choices)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_a_stream_is_the_same_answer(tenant, base_name) -> None:
    options = {
        "model": base_name,
        "messages": HELLO,
        "response_format": AS_TICKET,
        "seed": 5,
        "max_tokens": 200,
    }
    client = tenant.openai()
    whole = client.chat.completions.create(**options).choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole
    assert is_ticket(whole)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_an_answer_cut_short_says_so(tenant, base_name) -> None:
    answer = tenant.openai().chat.completions.create(
        model=base_name, messages=HELLO, response_format={"type": "json_object"}, max_tokens=1
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content.startswith("{")


def test_regex_and_grammar_on_completions(tenant, base_name) -> None:
    completions = tenant.openai().completions
    options = {"model": base_name, "prompt": ["x", "y"], "max_tokens": 50}
    of_regex = completions.create(**options, extra_body={"regex": "[0-9]{3}-[a-f]{2}"})
    for choice in of_regex.choices:
        head, tail = choice.text.split("-")
        assert (head.isdigit(), len(head), len(tail)) == (True, 3, 2)
    lark = 'start: "yes" | "no, " /[a-z]{4}/'
    of_grammar = completions.create(**options, extra_body={"grammar": lark})
    assert all(c.text == "yes" or c.text.startswith("no, ") for c in of_grammar.choices)


def test_an_adapter_answers_in_the_schema_too(tenant, make_adapter) -> None:
    assert tenant.push("shaped", make_adapter(11)).status_code == 201
    answer = tenant.openai().chat.completions.create(
        model="shaped", messages=HELLO, response_format=AS_TICKET, max_tokens=200
    )
    assert is_ticket(answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"properties": {"a": {"not": {}}}}},
                }
            },
            "response_format.json_schema.schema/properties/a",
        ),
        ({"extra_body": {"regex": "(a"}}, "regex"),
        ({"extra_body": {"grammar": "start: nothing"}}, "grammar"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_schema_is_refused_with_its_place(tenant, base_name, fields, param, stream) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        tenant.openai().chat.completions.create(
            model=base_name, messages=HELLO, stream=stream, **fields
        )
    assert (refused.value.code, refused.value.param) == ("invalid_schema", param)


def test_what_only_the_vocabulary_can_tell_is_refused_too(tenant, base_name) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        tenant.openai().chat.completions.create(
            model=base_name,
            messages=HELLO,
            stream=True,
            extra_body={"grammar": "start: <|no_such_token|>"},
        )
    assert refused.value.code == "invalid_schema"
