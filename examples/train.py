"""Trains one example adapter with PEFT and a plain torch loop.

    python -m examples.train --base FOLDER --task brand-voice-v1 --out DIR

Run it in the root of a checkout. FOLDER holds SmolLM2-135M-Instruct as transformers saves it.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from examples.cases import Case
from examples.tasks import TASKS, training

BASE_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SEED = 135


@dataclass(frozen=True)
class Recipe:
    """The shape of one adapter and how long it learns."""

    rank: int
    modules: tuple[str, ...]
    rslora: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    steps: int = 90
    batch: int = 8
    learning_rate: float = 2e-3

    def lora(self) -> LoraConfig:
        return LoraConfig(
            task_type="CAUSAL_LM",
            r=self.rank,
            lora_alpha=self.rank if self.rslora else 2 * self.rank,
            use_rslora=self.rslora,
            rank_pattern=self.rank_pattern,
            target_modules=list(self.modules),
        )


# Deliberately unlike each other, and one rank that no page size divides: a server of adapters has
# to serve what people upload, so the examples show the variety.
RECIPES = {
    "support-tickets": Recipe(rank=8, modules=("q_proj", "k_proj", "v_proj", "o_proj"), steps=120),
    "text-to-sql": Recipe(rank=4, modules=ALL_LINEAR, rank_pattern={"k_proj": 2, "down_proj": 6}),
    "brand-voice-v1": Recipe(rank=16, modules=("q_proj", "v_proj"), rslora=True, steps=60),
    "brand-voice-v2": Recipe(rank=10, modules=("q_proj", "v_proj", "o_proj"), steps=60),
}


@dataclass(frozen=True)
class Example:
    """A case as token ids; only the `answer` last ones are to be learned."""

    ids: list[int]
    answer: int


def encode(tokenizer: Any, case: Case) -> Example:
    """The prompt exactly as a server renders it, then the answer and the end of the turn."""
    prompt = tokenizer.apply_chat_template(
        list(case.messages), add_generation_prompt=True, tokenize=False
    )
    prompt_ids: list[int] = tokenizer(prompt, add_special_tokens=False).input_ids
    answer: list[int] = tokenizer(case.expected, add_special_tokens=False).input_ids
    answer = [*answer, tokenizer.eos_token_id]
    return Example(prompt_ids + answer, len(answer))


def batches(examples: Sequence[Example], size: int, steps: int) -> Iterator[list[Example]]:
    """`steps` batches, epoch after epoch in a new order."""
    rng = random.Random(SEED)
    queue: list[Example] = []
    for _ in range(steps):
        if len(queue) < size:
            queue += rng.sample(examples, len(examples))
        yield [queue.pop() for _ in range(size)]


def loss_of(model: Any, batch: Sequence[Example]) -> Tensor:
    """Cross entropy on the answers' tokens, with no work done twice or in vain.

    The tokens with which all examples of the batch begin, such as the system message, go through
    the model once; logits are made for the answers alone. It is the same loss, in half the time.
    """
    shared = len(commonprefix([example.ids for example in batch]))
    longest = max(len(example.ids) for example in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    learned = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, example in enumerate(batch):
        end = len(example.ids)
        ids[row, :end] = torch.tensor(example.ids)
        learned[row, end - example.answer : end] = True
    ids_after, learned_after = ids[:, shared:], learned[:, shared:]

    causal_lm = model.base_model.model
    cache = DynamicCache()
    causal_lm.model(input_ids=ids[:1, :shared], past_key_values=cache)
    cache.batch_repeat_interleave(len(batch))
    # Padding is on the right and attention is causal, so no real token ever sees it.
    hidden = causal_lm.model(input_ids=ids_after, past_key_values=cache).last_hidden_state
    logits = causal_lm.lm_head(hidden[:, :-1][learned_after[:, 1:]])
    return cross_entropy(logits.float(), ids_after[:, 1:][learned_after[:, 1:]])


def learning_rate(recipe: Recipe, step: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to nothing."""
    warm = max(1, recipe.steps // 10)
    if step < warm:
        return recipe.learning_rate * (step + 1) / warm
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / recipe.steps))


def fit(model: Any, recipe: Recipe, examples: Sequence[Example], title: str) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task(title, total=recipe.steps, loss=math.nan)
        for step, batch in enumerate(batches(examples, recipe.batch, recipe.steps)):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, step)
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            progress.update(bar, advance=1, loss=loss.item())


def save(model: Any, out: Path) -> None:
    """Saves in bf16, names the base by its public id, and leaves only the two files of an adapter.

    PEFT would note the folder that the base was read from, which means nothing elsewhere.
    """
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    config_file = out / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["base_model_name_or_path"] = BASE_ID
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one example adapter.")
    parser.add_argument("--base", type=Path, required=True, help="SmolLM2-135M-Instruct's folder")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where the adapter is saved")
    arguments = parser.parse_args()

    torch.manual_seed(SEED)
    recipe = RECIPES[arguments.task]
    tokenizer = AutoTokenizer.from_pretrained(arguments.base)
    base = AutoModelForCausalLM.from_pretrained(arguments.base, dtype=torch.bfloat16)
    model = get_peft_model(base, recipe.lora())
    model.train()
    examples = [encode(tokenizer, case) for case in training(arguments.task)]
    start = time.perf_counter()
    fit(model, recipe, examples, arguments.task)
    save(model, arguments.out)
    print(f"{arguments.task}: {time.perf_counter() - start:.0f} s, saved to {arguments.out}")


if __name__ == "__main__":
    main()
