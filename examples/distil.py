"""Makes a draft model out of a base: some of its layers, taught to speak like all of them.

    python -m examples.distil --base FOLDER --out DIR [--layers 4] [--minutes 6]

The copy keeps evenly spaced layers, the tokenizer and the embedding, which is also its output head,
and learns the base's own distribution on the base's own greedy answers to everyday questions.
Serve it with `polyloom serve --base … --draft-model DIR`.
"""

import argparse
import math
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers import AutoModelForCausalLM

from examples.draft_prompts import GENERAL, prompts
from polyloom.platform.engine.draft_heads.training.responses import responses, target
from polyloom.platform.engine.draft_heads.training.samples import Response
from polyloom.platform.engine.model.store import eos_token_ids
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.generation.prompts import shipped_template
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.generation.tokenizers import TextTokenizer

SEED = 135
BATCH = 12
ANSWER_TOKENS = 128
WARM_UP = 0.05
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Recipe:
    """layers: how many the copy keeps.  prompts: how many questions the base answers.  minutes: of
    learning, after that."""

    layers: int = 4
    prompts: int = 320
    minutes: float = 6.0
    learning_rate: float = 1e-3


def pruned(base: Path, layers: int) -> Any:
    """The base with `layers` of its layers, evenly spaced, the first and the last among them."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    kept = torch.linspace(0, len(model.model.layers) - 1, layers).round().int().tolist()
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in kept])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = layers
    model.lm_head.weight.requires_grad_(False)  # the embedding too: they are one tensor
    return model


def answers(base: Path, count: int, work: Path, tell: partial[None]) -> list[Response]:
    """The base's greedy answers to `count` everyday questions, and the states behind them."""
    chat = ChatTemplate(TextTokenizer(base), shipped_template(base))
    asked = []
    for messages in random.Random(SEED).sample(prompts(GENERAL, "train"), count):
        text = chat.tokenizer.transformers.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        asked.append(tuple(chat.tokenizer.encode_now(str(text), special_tokens=False)))
    settings = EngineSettings(
        model_folder=str(base),
        base_name="base",
        base_digest="sha256:base",
        address="ipc:///unused",
        kv_memory=1 << 29,
        adapter_memory=1 << 24,
        threads=torch.get_num_threads(),
    )
    make = partial(target, settings, None, eos_token_ids(base))
    return list(responses(make, asked, ANSWER_TOKENS, work, tell))


def loss_of(model: Any, batch: Sequence[Response]) -> Tensor:
    """KL of the copy's distribution from the base's, at every token of the answers."""
    longest = max(len(answer.prompt) + len(answer.output) for answer in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    learned = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, answer in enumerate(batch):
        start, end = len(answer.prompt), len(answer.prompt) + len(answer.output)
        ids[row, :end] = torch.tensor(answer.prompt + answer.output)
        learned[row, start - 1 : end - 1] = True
    states = torch.cat([answer.hidden for answer in batch])
    with torch.autocast("cpu", torch.bfloat16):
        # Padding is on the right and attention is causal, so no real token ever sees it.
        hidden = model.model(input_ids=ids).last_hidden_state[learned]
        logprobs = F.log_softmax(F.linear(hidden, model.lm_head.weight), dim=-1)
        with torch.no_grad():
            wanted = F.softmax(F.linear(states, model.lm_head.weight), dim=-1)
    return -(wanted * logprobs).sum() / len(states)


def fit(model: Any, learned: Sequence[Response], recipe: Recipe, tell: partial[None]) -> None:
    """Learn for the recipe's minutes, with a warm-up and a cosine over them."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.01)
    rng, order, started = random.Random(SEED), list[Response](), time.monotonic()
    model.train()
    while (done := (time.monotonic() - started) / (60 * recipe.minutes)) < 1:
        if len(order) < BATCH:
            order = rng.sample(learned, len(learned))
        batch, order = order[:BATCH], order[BATCH:]
        rate = min(1.0, done / WARM_UP) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * rate
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        tell(completed=100 * min(done, 1.0), note=f"loss {loss.item():.3f}")


def distil(base: Path, out: Path, recipe: Recipe) -> None:
    """Write the copy to `out`, which appears when it is whole."""
    torch.manual_seed(SEED)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}")
    with (
        Progress(*columns, TimeElapsedColumn()) as progress,
        tempfile.TemporaryDirectory(prefix="polyloom-distil-") as work,
    ):
        asking = progress.add_task("answer", total=recipe.prompts, note="")
        learned = answers(base, recipe.prompts, Path(work), partial(_advance, progress, asking))
        model, learning = pruned(base, recipe.layers), progress.add_task("learn", note="")
        fit(model, learned, recipe, partial(progress.update, learning))
    partial_out = out.with_name(out.name + ".partial")
    model.to(torch.bfloat16).save_pretrained(partial_out)
    for name in TOKENIZER_FILES:
        if (base / name).exists():
            shutil.copy(base / name, partial_out)
    partial_out.rename(out)


def _advance(progress: Progress, task: TaskID, count: int) -> None:
    progress.advance(task, count)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a draft model out of a base.")
    parser.add_argument("--base", type=Path, required=True, help="SmolLM2-135M-Instruct's folder")
    parser.add_argument("--out", type=Path, required=True, help="a folder that is not there yet")
    parser.add_argument("--layers", type=int, default=Recipe.layers)
    parser.add_argument("--minutes", type=float, default=Recipe.minutes)
    arguments = parser.parse_args()
    distil(arguments.base, arguments.out, Recipe(arguments.layers, minutes=arguments.minutes))


if __name__ == "__main__":
    main()
