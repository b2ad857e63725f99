"""Tool calls through a whole server and the official client."""

import asyncio
import json

import openai
import pytest

from examples import tool_call

HELLO = [{"role": "user", "content": "What is the weather in Bern?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bern", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def check(call) -> None:
    assert call.type == "function"
    assert call.id.startswith("call_")
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        assert arguments == {}
    else:
        assert call.function.name == "get_weather"
        assert set(arguments) == {"city", "days"}


def options(base_name, **more):
    return {
        "model": base_name,
        "messages": HELLO,
        "tools": [WEATHER, NOW],
        "max_tokens": 300,
    } | more


def test_a_required_call(tenant, base_name) -> None:
    answer = tenant.openai().chat.completions.create(
        **options(base_name, tool_choice="required", n=3, seed=2)
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        for call in choice.message.tool_calls:
            check(call)


def test_a_named_call_streamed(tenant, base_name) -> None:
    asked = options(base_name, tool_choice=NAMED, parallel_tool_calls=False, seed=4)
    client = tenant.openai()
    (whole,) = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert whole.function.name == "get_weather"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    deltas = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or ()]
    assert len(deltas) > 2
    first, rest = deltas[0], deltas[1:]
    assert (first.index, first.type, first.function.name) == (0, "function", "get_weather")
    assert first.id.startswith("call_")
    assert all((d.index, d.id, d.type, d.function.name) == (0, None, None, None) for d in rest)
    assert "".join(d.function.arguments for d in deltas) == whole.function.arguments
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks][-1] == "tool_calls"


@pytest.mark.slow
def test_a_real_model_streams_the_example_s_call(serve_another, smollm2, tmp_path) -> None:
    with serve_another(smollm2.folder, tmp_path, dtype="bfloat16") as server:
        tenant = server.new_tenant()

        async def called() -> dict[str, str]:
            url = f"{server.url}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=tenant.key) as client:
                model = (await client.models.list()).data[0].id
                return await tool_call.call(client, model)

        arguments = asyncio.run(called())
    assert arguments["unit"] in ("celsius", "fahrenheit")
    assert 0 < len(arguments["city"]) <= 30


def test_the_client_s_own_accumulation(tenant, base_name) -> None:
    """`stream()` of the official client puts the deltas together and checks them."""
    with tenant.openai().chat.completions.stream(
        **options(base_name, tool_choice="required", seed=9)
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    for call in message.tool_calls:
        check(call)


def test_a_call_cut_short_is_no_call_that_ended(tenant, base_name) -> None:
    answer = tenant.openai().chat.completions.create(
        **options(base_name, tool_choice=NAMED) | {"max_tokens": 2}
    )
    assert answer.choices[0].finish_reason == "length"


def test_text_stays_text(tenant, base_name) -> None:
    answer = tenant.openai().chat.completions.create(
        **options(base_name, seed=1, logprobs=True) | {"max_tokens": 12}
    )
    message = answer.choices[0].message
    assert (answer.choices[0].finish_reason, message.tool_calls) == ("length", None)
    assert len(answer.choices[0].logprobs.content) == 12


def test_a_conversation_with_results_goes_on(tenant, base_name) -> None:
    client = tenant.openai()
    first = client.chat.completions.create(
        **options(base_name, tool_choice="required", parallel_tool_calls=False)
    )
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 degrees"}
    history = [*HELLO, message.to_dict(), result]
    asked = options(base_name) | {"messages": history, "max_tokens": 4}
    assert client.chat.completions.create(**asked).usage.prompt_tokens > first.usage.prompt_tokens


def test_tools_are_part_of_the_prompt_unless_they_cannot_be_called(tenant, base_name) -> None:
    def prompt_tokens(**more) -> int:
        asked = options(base_name) | {"max_tokens": 1} | more
        return tenant.openai().chat.completions.create(**asked).usage.prompt_tokens

    bare = prompt_tokens(tools=[])
    assert prompt_tokens(tool_choice="none") == bare
    assert prompt_tokens(tools=[NOW]) > bare
    assert prompt_tokens() > prompt_tokens(tools=[NOW])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
        ({"tools": [NOW, NOW]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        (
            {
                "tool_choice": "required",
                "tools": [
                    NOW,
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "parameters": {"properties": {"x": {"type": "nothing"}}},
                        },
                    },
                ],
            },
            "tools[1].function.parameters/properties/x",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {
                                "id": "a",
                                "type": "function",
                                "function": {"name": "f", "arguments": "no"},
                            }
                        ],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"extra_body": {"regex": "a"}}, "regex"),
        ({"tool_choice": "required", "extra_body": {"min_tokens": 1}}, "min_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(tenant, base_name, fields, param) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        tenant.openai().chat.completions.create(**options(base_name) | fields)
    assert refused.value.param == param
