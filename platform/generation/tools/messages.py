"""A conversation with tools, for templates that know them and for those that do not."""

import json
from typing import Any

from polyloom.platform.generation.templates import ChatTemplate, Message
from polyloom.platform.generation.tools.formats import LISTED
from polyloom.platform.generation.tools.requests import ToolUse

_INSTRUCTIONS = """\
You can call functions to help with the request. They are described here, one a line:
<tools>
{tools}
</tools>
To call functions, answer with nothing but a JSON list of calls between tags, like this:
<tool_call>[{{"name": "function_name", "arguments": {{"argument": "value"}}}}]</tool_call>
If no function helps, answer in plain words."""


async def render_prompt(
    template: ChatTemplate, messages: list[Message], use: ToolUse | None, tenant: str
) -> str:
    """The prompt text of a conversation, the tools in it. Raises what `ChatTemplate.render` does."""
    if template.knows_tools:
        return await template.render(messages, tenant, use.described if use else None)
    return await template.render(written_out(messages, use), tenant)


def written_out(messages: list[Message], use: ToolUse | None) -> list[Message]:
    """The same conversation for a template that knows no tools: their description in the system
    message, calls as text, and results as messages of the user."""
    plain = [_plain(message) for message in messages]
    if use is None:
        return plain
    tools = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in use.described)
    instructions = _INSTRUCTIONS.format(tools=tools)
    if plain and plain[0]["role"] == "system":
        text = f"{plain[0]['content']}\n\n{instructions}"
        return [plain[0] | {"content": text}, *plain[1:]]
    return [{"role": "system", "content": instructions}, *plain]


def _plain(message: Message) -> Message:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls: list[dict[str, Any]] = message.get("tool_calls", [])
    if not calls:
        return message
    objects = [
        {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in calls
    ]
    written = LISTED.opening + json.dumps(objects, ensure_ascii=False) + LISTED.closing
    text = "\n".join(part for part in (message["content"], written) if part)
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}
