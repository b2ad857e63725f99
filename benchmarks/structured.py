"""Random schemas on a random model: how many answers end in time, and whether each is valid.

    python -m benchmarks.structured --count 10000

Every answer is sampled at temperature 1 from a tiny random Llama, so nothing but the grammar makes
it JSON; answers that ended are held to their schema by the `jsonschema` package.
"""

import argparse
import json
import logging
import multiprocessing
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.bars import Bar, show_bars
from benchmarks.parity import BASE_DIGEST, engine_settings, tiny_base
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.messages import Finished, Tokens
from polyloom.platform.engine.step import Engine
from polyloom.platform.generation.answer_formats import vocabulary_of
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.routing.combination import Combination
from polyloom.routing.grammar import Grammar
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams

VOCABULARY = 384
MAX_TOKENS = 200
WORDS = [
    "name",
    "city",
    "count",
    "ticket",
    "priority",
    "summary",
    "amount",
    "due_date",
    "is_open",
    "customer_id",
]
_END = "<|end|>"


@dataclass
class Report:
    """Answers by how they ended. wrong: finished ones that their schema refuses."""

    asked: int = 0
    finished: int = 0
    cut: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __add__(self, other: "Report") -> "Report":
        return Report(
            self.asked + other.asked,
            self.finished + other.finished,
            self.cut + other.cut,
            self.failed + other.failed,
            self.wrong + other.wrong,
        )

    def bars(self) -> Iterator[Bar]:
        share = self.finished / max(self.asked, 1)
        asked = f"{share:.2%} of {self.asked}"
        yield Bar("random schemas, answers that end in time", asked, ">= 95 %", share >= 0.95)
        valid = self.finished - len(self.wrong)
        yield Bar("of those, valid", f"{valid} of {self.finished}", "all", not self.wrong)
        yield Bar("errors", str(len(self.failed)), "none", not self.failed)


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """An object of one to four properties."""
    names = rng.sample(WORDS, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _random_value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _random_value(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = [_string, _integer, _choice, lambda rng: {"type": rng.choice(["boolean", "null"])}]
    if depth > 0:
        kinds += [
            lambda rng: random_schema(rng, depth),
            lambda rng: {
                "type": "array",
                "items": _random_value(rng, depth - 1),
                "minItems": rng.randint(0, 1),
                "maxItems": rng.randint(1, 3),
            },
            lambda rng: {"anyOf": [_integer(rng), _choice(rng)]},
        ]
    return rng.choice(kinds)(rng)


def _string(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.3:
        return {"type": "string", "pattern": rng.choice(["^[A-Z]{2}[0-9]{3}$", "^(a|bc){1,4}$"])}
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 12)}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _choice(rng: random.Random) -> dict[str, Any]:
    return {"enum": [*rng.sample(["low", "mid", "high", 'q"uote', "Grüße"], rng.randint(1, 3))]}


def write_tokenizer(folder: Path) -> TextTokenizer:
    """A byte-level BPE trained on JSON, beside the model in `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    tokenizer.train_from_iterator([json.dumps(random_schema(rng)) for _ in range(200)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END).save_pretrained(folder)
    (folder / "generation_config.json").unlink()  # its end token is a letter here
    return TextTokenizer(folder)


def run(count: int, seed: int = 0) -> Report:
    """`count` random schemas, each with a random prompt."""
    rng = random.Random(seed)
    with tiny_base() as base:
        tokenizer = write_tokenizer(base)
        engine = build_engine(engine_settings(base, kv_memory=8 << 20, token_budget=256))
        try:
            schemas = {str(index): random_schema(rng) for index in range(count)}
            requests = (_request(name, schema, tokenizer, rng) for name, schema in schemas.items())
            return _held_to(schemas, _answers(engine, requests), tokenizer)
        finally:
            engine.close()


def _request(
    name: str, schema: dict[str, Any], tokenizer: TextTokenizer, rng: random.Random
) -> GenerationRequest:
    return GenerationRequest(
        sequence_id=name,
        tenant="bench",
        combination=Combination(BASE_DIGEST, "sha256:" + sha256(b"template").hexdigest()),
        adapter=None,
        prompt=tuple(rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 24))),
        sampling=SamplingParams(
            max_tokens=MAX_TOKENS, seed=rng.getrandbits(64), stop_token_ids=tokenizer.eos_ids
        ),
        grammar=Grammar(
            kind="json_schema", text=json.dumps(schema), vocabulary=vocabulary_of(tokenizer, ())
        ),
    )


def _answers(
    engine: Engine, requests: Iterator[GenerationRequest]
) -> Iterator[tuple[list[int], Finished]]:
    """Each request's tokens and end, as they end; at most 64 are in the engine at once."""
    tokens: dict[str, list[int]] = {}
    upcoming = next(requests, None)
    while upcoming is not None or engine.has_work:
        while upcoming is not None and len(tokens) < 64:
            tokens[upcoming.sequence_id] = []
            if (refused := engine.submit(upcoming)) is not None:
                raise RuntimeError(f"refused: {refused.message}")
            upcoming = next(requests, None)
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens[event.sequence_id] += event.token_ids
            elif isinstance(event, Finished):
                yield tokens.pop(event.sequence_id), event


def _held_to(
    schemas: dict[str, dict[str, Any]],
    answers: Iterator[tuple[list[int], Finished]],
    tokenizer: TextTokenizer,
) -> Report:
    report = Report()
    for token_ids, end in answers:
        report.asked += 1
        text = b"".join(map(tokenizer.token_bytes, token_ids)).decode()
        if end.reason == "length":
            report.cut += 1
        elif end.reason != "stop":
            report.failed.append(f"{schemas[end.sequence_id]}: {end.error}")
        else:
            report.finished += 1
            if not _is_valid(text, schemas[end.sequence_id]):
                report.wrong.append(f"{schemas[end.sequence_id]}: {text}")
    return report


def _is_valid(text: str, schema: dict[str, Any]) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return Draft202012Validator(schema).is_valid(value)


def run_spread(count: int, seed: int = 0, processes: int = 2) -> Report:
    """The same in several processes: operators this small are not worth a second thread."""
    shares = [(count + place) // processes for place in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes, _one_thread) as pool:
        parts = pool.starmap(run, [(n, seed + place) for place, n in enumerate(shares)])
    return sum(parts, Report())


def _one_thread() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)


def main() -> int:
    """The bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = run_spread(options.count, options.seed)
    for line in (*report.failed[:3], *report.wrong[:3]):
        print(line)
    return show_bars(report.bars())


if __name__ == "__main__":
    sys.exit(main())
