"""A streamed tool call with the official `openai` client, piece by piece.

    python -m examples.tool_call                # starts a server of its own

Needs the `test` extra for the client.
"""

import argparse
import asyncio
import json

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionToolParam

from examples.local_server import local_server

BASE = "smollm2-135m-instruct"
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 30},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


async def call(client: AsyncOpenAI, model: str) -> dict[str, str]:
    """Ask for the weather and show each delta as it comes; the call's arguments."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Paris, in Celsius?"}],
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        temperature=0,
        stream=True,
    )
    arguments = ""
    async for chunk in stream:
        choice = chunk.choices[0]
        for delta in choice.delta.tool_calls or ():
            print(json.dumps(delta.model_dump(exclude_none=True)))
            if delta.function is not None:
                arguments += delta.function.arguments or ""
        if choice.finish_reason is not None:
            print(f"finish_reason: {choice.finish_reason}")
    parsed: dict[str, str] = json.loads(arguments)
    print(f"get_weather({parsed})")
    return parsed


async def run(base: str) -> None:
    async with local_server(base) as server:
        key = await server.create_tenant("tools", ["inference"])
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key) as client:
            await call(client, (await client.models.list()).data[0].id)


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream a tool call.")
    parser.add_argument("--base", default=BASE, help="a known name, a folder or a hub id")
    asyncio.run(run(parser.parse_args().base))


if __name__ == "__main__":
    main()
