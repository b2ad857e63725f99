"""What every example task is made of.

A task is data and a rule, nothing else: cases to learn from, cases held out, and a check that says
which of the task's rules an answer keeps. Cases carry the slots that filled them, so that a test
can prove that no word a held-out case turns on was ever seen in training.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Split: TypeAlias = Literal["train", "held_out"]
Message: TypeAlias = dict[str, str]
Rules: TypeAlias = dict[str, bool]

_FENCE = re.compile(r"```[a-z]*\n(.*?)```", re.DOTALL)
_TRIES = 100


@dataclass(frozen=True)
class Case:
    """One question: what is sent, the reference answer, and the slots that made both."""

    messages: tuple[Message, ...]
    expected: str
    slots: tuple[tuple[str, str], ...]

    def slot(self, name: str) -> str:
        return dict(self.slots)[name]


@dataclass(frozen=True)
class Task:
    """A fine-tune's data and rule.

    `brief` is what a fair prompt would tell the base where the task's own messages do not say it:
    scoring gives the base that advantage too, so that the adapter is not praised for knowing
    rules that nobody told the base.
    """

    make: Callable[[random.Random, Split], Case]
    check: Callable[[str, Case], Rules]
    train_cases: int = 640
    held_out_cases: int = 48
    brief: str | None = None


def draw(task: Task, split: Split) -> list[Case]:
    """The split's cases, all different, the same ones on every machine."""
    count = task.train_cases if split == "train" else task.held_out_cases
    rng = random.Random(f"polyloom examples {split}")
    cases: dict[tuple[tuple[str, str], ...], Case] = {}
    for _ in range(_TRIES * count):
        case = task.make(rng, split)
        cases.setdefault(case.slots, case)
        if len(cases) == count:
            return list(cases.values())
    raise ValueError(f"the templates make fewer than {count} different {split} cases")


def pick(rng: random.Random, split: Split, values: dict[Split, Sequence[str]]) -> str:
    return rng.choice(values[split])


def unfenced(answer: str) -> str:
    """The answer without a Markdown code fence: the base likes them, and they are no mistake."""
    fenced = _FENCE.search(answer)
    return (fenced.group(1) if fenced else answer).strip()
