"""Scores the example adapters against their base on the held-out cases, greedily.

    python -m examples.score --base FOLDER

Run it in the root of a checkout. The table is Markdown, one line per rule of a task, so that it
shows what an adapter has not learned as well as what it has. Progress goes to stderr.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from rich.progress import Progress, TaskID
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.cases import Case
from examples.tasks import TASKS, check, held_out

ADAPTERS = Path(__file__).parent / "adapters"
# The longest reference answer has 35 tokens; the base may be somewhat wordier before it is cut.
MAX_NEW_TOKENS = 64
BATCH = 24


@dataclass(frozen=True)
class Score:
    """How many of a task's cases keep each rule, and how many keep all."""

    cases: int
    kept: dict[str, int]
    all_rules: int


def briefed(task: str, cases: Sequence[Case]) -> list[Case] | None:
    """The cases with the task's rules as a system message, where they do not state them already."""
    brief = TASKS[task].brief
    if brief is None:
        return None
    system = {"role": "system", "content": brief}
    return [replace(case, messages=(system, *case.messages)) for case in cases]


def score(task: str, cases: Sequence[Case], answers: Sequence[str]) -> Score:
    verdicts = [check(task, answer, case) for answer, case in zip(answers, cases, strict=True)]
    kept = {rule: sum(verdict[rule] for verdict in verdicts) for rule in verdicts[0]}
    return Score(len(cases), kept, sum(all(verdict.values()) for verdict in verdicts))


@dataclass(frozen=True)
class Writer:
    """Answers cases with one model and says how far it is."""

    model: Any
    tokenizer: Any
    progress: Progress

    def answers(self, cases: Sequence[Case], title: str, adapted: bool) -> list[str]:
        bar = self.progress.add_task(title, total=len(cases))
        with nullcontext() if adapted else self.model.disable_adapter():
            return [answer for batch in self._batches(cases, bar) for answer in batch]

    def _batches(self, cases: Sequence[Case], bar: TaskID) -> Iterator[list[str]]:
        for start in range(0, len(cases), BATCH):
            batch = cases[start : start + BATCH]
            yield self._generate(batch)
            self.progress.advance(bar, len(batch))

    @torch.inference_mode()
    def _generate(self, cases: Sequence[Case]) -> list[str]:
        prompts = [
            self.tokenizer.apply_chat_template(
                list(case.messages), add_generation_prompt=True, tokenize=False
            )
            for case in cases
        ]
        inputs = self.tokenizer(
            prompts, add_special_tokens=False, padding=True, return_tensors="pt"
        )
        output = self.model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
        )
        new = output[:, inputs.input_ids.shape[1] :]
        answers: list[str] = self.tokenizer.batch_decode(new, skip_special_tokens=True)
        return answers


def lines(task: str, columns: Sequence[Score | None]) -> Iterator[str]:
    """The task's part of the table."""
    known = next(column for column in columns if column is not None)
    for rule in ["all rules", *known.kept]:
        cells = [
            "–" if column is None else str(column.kept.get(rule, column.all_rules))
            for column in columns
        ]
        name = f"**{task}** ({known.cases} cases)" if rule == "all rules" else ""
        yield f"| {name} | {rule} | {' | '.join(cells)} |"


def compare(task: str, writer: Writer, show: int) -> Iterator[str]:
    """Base, briefed base and adapter on one task."""
    cases = held_out(task)
    told = briefed(task, cases)
    plain = writer.answers(cases, f"{task}: base", adapted=False)
    obedient = told and writer.answers(told, f"{task}: base, told the rules", adapted=False)
    tuned = writer.answers(cases, f"{task}: adapter", adapted=True)
    for case, base_answer, answer in list(zip(cases, plain, tuned, strict=True))[:show]:
        question = case.messages[-1]["content"]
        print(f"\n> {question}\nbase: {base_answer}\nadapter: {answer}", file=sys.stderr)
    yield from lines(
        task,
        [
            score(task, cases, plain),
            score(task, cases, obedient) if obedient else None,
            score(task, cases, tuned),
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Score the example adapters on held-out cases.")
    parser.add_argument("--base", type=Path, required=True, help="SmolLM2-135M-Instruct's folder")
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="a folder per task")
    parser.add_argument("--task", choices=TASKS, action="append", help="repeat; default: all")
    parser.add_argument("--show", type=int, default=0, help="answers to print per task, to stderr")
    arguments = parser.parse_args()

    start = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(arguments.base, padding_side="left")
    base = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.bfloat16).eval()
    print("| task | rule | base | base, told the rules | adapter |")
    print("| --- | --- | ---: | ---: | ---: |")
    with Progress(console=Console(stderr=True)) as progress:
        for task in arguments.task or TASKS:
            model = PeftModel.from_pretrained(base, arguments.adapters / task).eval()
            for line in compare(task, Writer(model, tokenizer, progress), arguments.show):
                print(line, flush=True)
            base = model.unload()
    print(f"scored in {time.perf_counter() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
