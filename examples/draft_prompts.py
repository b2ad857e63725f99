"""Writes the prompts that draft heads are trained on, and judged on, as JSON lines.

    python -m examples.draft_prompts --task general --out general.jsonl
    python -m examples.draft_prompts --task text-to-sql --split held_out --out sql-held-out.jsonl

`general` is for a base's shared head: everyday questions of many kinds. The other tasks are those
of the example adapters. Held-out prompts turn on words that no training prompt has.
"""

import argparse
import json
import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import cast

from examples.cases import Message, Split, draw
from examples.tasks import TASKS

GENERAL = "general"
SEED = 135

_TOPICS: dict[Split, Sequence[str]] = {
    "train": (
        "a red fox", "the river Nile", "photosynthesis", "the French Revolution", "black holes",
        "bread baking", "a lighthouse", "chess openings", "the moon landing", "coral reefs",
        "volcanoes", "a lost dog", "jazz music", "the Roman Empire", "electric cars", "bees",
        "winter storms", "ancient Egypt", "the human heart", "computer viruses", "gardening",
        "glaciers", "a haunted house", "public libraries", "solar panels", "the violin",
        "a night train", "earthquakes", "good sleep", "the printing press", "a job interview",
        "dinosaurs", "city traffic", "the stock market", "learning Spanish", "whales",
        "a birthday party", "vaccines", "mountain climbing", "recycling", "a broken bicycle",
        "the internet", "honesty", "tomato soup", "bridges", "the Olympic Games", "rainforests",
        "a chess club", "time zones", "databases", "a museum visit", "dragons", "wheat farming",
        "the speed of light", "friendship", "a long voyage", "credit cards", "insects",
    ),
    "held_out": (
        "tea ceremonies", "a stolen painting", "the Great Wall of China", "penguins", "magnetism",
        "a school play", "house plants", "the steam engine", "football", "desert nights",
    ),
}  # fmt: skip
_QUESTIONS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "List five facts about {}.",
    "Why is {} important?",
    "Write a poem about {}.",
    "Summarize what is known about {}.",
    "Give advice to someone interested in {}.",
    "Compare {} with something similar.",
    "What is {}?",
    "Write an email to a colleague about {}.",
    "What are the pros and cons of {}?",
    "How did {} come to be?",
)
_TRAIN_PROMPTS, _HELD_OUT_PROMPTS = 360, 40
_WORK: dict[Split, Sequence[str]] = {
    "train": (
        *(
            f"Write a Python function that {work}."
            for work in (
                "reverses a string", "counts the words of a text", "finds the largest number",
                "reads a CSV file", "checks for a palindrome", "sorts a list of names",
                "adds two matrices", "removes duplicates", "computes a factorial",
                "converts Celsius to Fahrenheit", "merges two dictionaries", "parses a date",
            )
        ),
        *(
            f"Write a SQL query that {work}."
            for work in (
                "counts the orders of each customer", "lists all products below 20 dollars",
                "finds the newest invoice", "sums the sales of each month",
                "deletes users who never logged in", "joins orders with customers",
                "shows the ten best employees", "updates the price of a product",
            )
        ),
        *(
            f"Reply politely to a customer who {work}."
            for work in (
                "has not received a parcel", "wants a refund", "forgot a password",
                "was charged twice", "asks for opening hours", "got a broken lamp",
                "wants to cancel a subscription", "praises the service",
            )
        ),
        *(
            f"Describe {thing} as a JSON object."
            for thing in (
                "a book", "a weather report", "a user account", "a recipe", "a support ticket",
                "a flight", "a song", "a shopping cart",
            )
        ),
    ),
    "held_out": (
        "Write a Python function that finds prime numbers.",
        "Write a SQL query that lists customers without orders.",
        "Reply politely to a customer who received the wrong size.",
        "Describe a car as a JSON object.",
    ),
}  # fmt: skip


def prompts(task: str, split: Split) -> list[tuple[Message, ...]]:
    """The conversations of one task, each without the answer."""
    if task != GENERAL:
        return [case.messages for case in draw(TASKS[task], split)]
    pairs = list(product(_TOPICS[split], _QUESTIONS))
    random.Random(SEED).shuffle(pairs)
    count = _TRAIN_PROMPTS if split == "train" else _HELD_OUT_PROMPTS
    asked = [ask.format(topic) for topic, ask in pairs[:count]]
    return [({"role": "user", "content": text},) for text in (*asked, *_WORK[split])]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the prompts for training a draft head.")
    parser.add_argument("--task", choices=[GENERAL, *TASKS], required=True)
    parser.add_argument("--split", choices=["train", "held_out"], default="train")
    parser.add_argument("--count", type=int, help="the first so many; all by default")
    parser.add_argument("--out", type=Path, required=True, help="a file of JSON lines")
    arguments = parser.parse_args()
    conversations = prompts(arguments.task, cast(Split, arguments.split))[: arguments.count]
    lines = (json.dumps({"messages": list(messages)}) for messages in conversations)
    arguments.out.write_text("".join(line + "\n" for line in lines))
    print(f"{len(conversations)} prompts, {arguments.out}")


if __name__ == "__main__":
    main()
