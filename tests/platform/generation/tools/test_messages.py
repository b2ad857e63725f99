"""Conversations with tools, rendered by templates that know them and by those that do not."""

import json
from collections.abc import AsyncIterator

import msgspec
import pytest

from polyloom.platform.api.chat import message_of
from polyloom.platform.api.schemas import ChatMessage
from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.template_workers import TemplateWorkers
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.platform.generation.tools.messages import render_prompt
from polyloom.platform.generation.tools.requests import Function, Tool, ToolUse, tool_use

TOOLS = msgspec.convert(
    [{"type": "function", "function": {"name": "f", "description": "does", "strict": True}}],
    list[Tool],
)
HISTORY = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"ü": 1}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "done"}]},
]
KNOWS = "{{ tools | tojson }}{% for m in messages %}|{{ m | tojson }}{% endfor %}"
PLAIN = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"


def use() -> ToolUse:
    found = tool_use(TOOLS, None, None)
    assert found is not None
    return found


def history() -> list[dict[str, object]]:
    messages = msgspec.convert(HISTORY, list[ChatMessage])
    return [message_of(m, f"messages[{i}]") for i, m in enumerate(messages)]


@pytest.fixture(params=["the operator's", "a tenant's"])
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[TemplateWorkers | None]:
    workers = TemplateWorkers()
    yield None if request.param == "the operator's" else workers
    await workers.close()


async def test_a_template_that_knows_tools_is_given_them(
    byte_level: TextTokenizer, workers: TemplateWorkers | None
) -> None:
    template = ChatTemplate(byte_level, KNOWS, workers)
    tools, user, call, result = (
        json.loads(part)
        for part in (await render_prompt(template, history(), use(), "t")).split("|")
    )
    assert tools[0]["function"]["name"] == "f"
    assert "strict" not in tools[0]["function"]
    assert user == HISTORY[0]
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": {"ü": 1}}
    assert result == {"role": "tool", "content": "done", "tool_call_id": "c1"}
    assert (await render_prompt(template, history(), None, "t")).startswith("null|")


async def test_for_one_that_knows_none_all_is_written_out(byte_level: TextTokenizer) -> None:
    template = ChatTemplate(byte_level, PLAIN)
    text = await render_prompt(template, history(), use(), "t")
    assert text.startswith("[system] You can call functions")
    assert '{"name": "f", "description": "does", "parameters": {' in text
    assert text.endswith(
        "[user] Hi\n"
        '[assistant] <tool_call>[{"name": "f", "arguments": {"ü": 1}}]</tool_call>\n'
        "[user] <tool_response>\ndone\n</tool_response>\n"
    )
    with_system = [{"role": "system", "content": "Be kind."}, *history()]
    text = await render_prompt(template, with_system, use(), "t")
    assert text.startswith("[system] Be kind.\n\nYou can call functions")
    assert "functions" not in await render_prompt(template, history(), None, "t")


def test_the_digest_is_of_what_the_prompt_says() -> None:
    other = msgspec.convert([{"type": "function", "function": {"name": "g"}}], list[Tool])
    lenient = msgspec.convert(
        [{"type": "function", "function": {"name": "f", "description": "does"}}], list[Tool]
    )
    digests = [
        found.digest for tools in (TOOLS, other, lenient) if (found := tool_use(tools, None, None))
    ]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "tool_calls": HISTORY[1]["tool_calls"]}, "m.tool_calls"),
        ({"role": "tool", "content": "x"}, "m.tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "m.tool_call_id"),
    ],
)
def test_fields_go_with_their_roles(message, param) -> None:
    with pytest.raises(InvalidRequest) as raised:
        message_of(msgspec.convert(message, ChatMessage), "m")
    assert raised.value.param == param


@pytest.mark.parametrize("levels", [101, 970, 5000])
def test_what_is_nested_too_deeply_is_refused(levels: int) -> None:
    parameters: dict[str, object] = {}
    for _ in range(levels):
        parameters = {"items": parameters}
    with pytest.raises(InvalidRequest) as raised:
        tool_use(
            [Tool(type="function", function=Function(name="f", parameters=parameters))], None, None
        )
    assert raised.value.param == "tools[0].function.parameters"

    function = {"name": "f", "arguments": '{"a":' * levels + "1" + "}" * levels}
    call = {"id": "c1", "type": "function", "function": function}
    message = msgspec.convert({"role": "assistant", "tool_calls": [call]}, ChatMessage)
    with pytest.raises(InvalidRequest) as raised:
        message_of(message, "messages[0]")
    assert raised.value.param == "messages[0].tool_calls[0].function.arguments"
