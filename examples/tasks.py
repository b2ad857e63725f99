"""The example fine-tunes by name: what they learn from, what is held out, and who judges.

for case in held_out("text-to-sql"):
    answer = ...            # send case.messages to the model
    passed("text-to-sql", answer, case)
"""

from examples import brand_voice, support_tickets, text_to_sql
from examples.cases import Case, Rules, Task, draw

TASKS: dict[str, Task] = {
    "support-tickets": support_tickets.TASK,
    "text-to-sql": text_to_sql.TASK,
    **brand_voice.TASKS,
}


def training(task: str) -> list[Case]:
    return draw(TASKS[task], "train")


def held_out(task: str) -> list[Case]:
    """The cases that scoring and the demo use; no slot of theirs occurs in training."""
    return draw(TASKS[task], "held_out")


def check(task: str, answer: str, case: Case) -> Rules:
    """Which of the task's rules the answer keeps."""
    return TASKS[task].check(answer, case)


def passed(task: str, answer: str, case: Case) -> bool:
    """Whether the answer keeps all of them."""
    return all(check(task, answer, case).values())
