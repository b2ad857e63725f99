"""Checks grammars before the engine sees them, and says where a schema is wrong."""

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from polyloom.platform.engine.errors import GrammarError
from polyloom.platform.engine.structured.source import check
from polyloom.platform.errors import InvalidSchema, QueueFull
from polyloom.platform.generation.answer_formats import AnswerFormat

WAIT_SECONDS = 5.0
MAX_KNOWN = 1024
MAX_PLACE_CHARACTERS = 300
MAX_LOOKED_AT = 200
"""Subschemas compiled to find the one at fault."""
LOOKING_SECONDS = 1.0
"""For which a thread that others wait for does so."""

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains")


class GrammarChecks:
    """Compiles grammars without a vocabulary, on threads of its own.

    llguidance bounds the work and the memory of each; a few of them at a time bound both together.
    """

    def __init__(self, threads: int = 2) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="grammar-check")
        self._good: OrderedDict[AnswerFormat, None] = OrderedDict()

    async def check(self, asked: AnswerFormat) -> None:
        """Raises InvalidSchema naming the place, QueueFull where too many are waiting."""
        if asked in self._good:
            self._good.move_to_end(asked)
            return
        work = asyncio.get_running_loop().run_in_executor(self._threads, fault, asked)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                problem = await work
        except TimeoutError:
            message = "too many grammars wait to be checked"
            raise QueueFull(message, param=asked.param, retry_after=1) from None
        if problem is not None:
            raise problem
        self._good[asked] = None
        while len(self._good) > MAX_KNOWN:
            self._good.popitem(last=False)

    def close(self) -> None:
        """End the threads once they are through with what they are at."""
        self._threads.shutdown(cancel_futures=True)


def fault(asked: AnswerFormat) -> InvalidSchema | None:
    """What is wrong with it, and where."""
    try:
        check(asked.kind, asked.text)
    except GrammarError as error:
        if asked.kind != "json_schema":
            return InvalidSchema(str(error), param=asked.param)
        return _located(asked, str(error))
    return None


def _located(asked: AnswerFormat, reason: str) -> InvalidSchema:
    try:
        place, reason = _deepest(json.loads(asked.text), reason)
    except RecursionError:
        place = ""
    if not 0 < len(place) <= MAX_PLACE_CHARACTERS:
        return InvalidSchema(reason, param=asked.param)
    return InvalidSchema(f"at {place}: {reason}", param=asked.param + place)


def _deepest(schema: dict[str, Any], reason: str) -> tuple[str, str]:
    """JSON pointer of the smallest subschema that fails by itself, and why it does; of one around
    it where looking takes too long."""
    root, place, node, left = _inside(schema), "", schema, MAX_LOOKED_AT
    until = time.monotonic() + LOOKING_SECONDS
    while True:
        for step, child in _children(node):
            left -= 1
            if left < 0 or time.monotonic() > until:
                return place, reason
            found = _reason(root, place + step)
            if found is not None:
                place, node, reason = place + step, child, found
                break
        else:
            return place, reason


def _reason(root: object, place: str) -> str | None:
    try:
        check("json_schema", json.dumps({"root": root, "$ref": f"#/root{place}"}))
    except GrammarError as error:
        return str(error)
    return None


def _inside(node: object) -> object:
    """A schema's copy with its references as they are when it stands under `root`."""
    if isinstance(node, list):
        return [_inside(item) for item in node]
    if not isinstance(node, dict):
        return node
    copy = {key: _inside(value) for key, value in node.items()}
    reference = copy.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = "#/root" + reference[1:]
    return copy


def _children(node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Subschemas that are objects, each with the end of its JSON pointer."""
    steps: list[tuple[str, object]] = [(f"/{key}", node[key]) for key in _SINGLE if key in node]
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            steps += [(f"/{key}/{_escaped(name)}", child) for name, child in node[key].items()]
    for key in _LISTS:
        if isinstance(node.get(key), list):
            steps += [(f"/{key}/{index}", child) for index, child in enumerate(node[key])]
    for step, child in steps:
        if isinstance(child, dict):
            yield step, child


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
