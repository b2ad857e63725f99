"""The target's own greedy responses and the states behind them, made by the engine in plain batches.

They are kept in files of `CHUNK` prompts, so that a killed run goes on with the next chunk.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyloom.adapters.source import AdapterSource
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.draft_heads.errors import TrainingError
from polyloom.platform.engine.draft_heads.training.samples import Response
from polyloom.platform.engine.messages import Finished, Refused
from polyloom.platform.engine.reading import RowResult
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.speculation.drafter import Drafter
from polyloom.platform.engine.speculation.speculator import DraftBlocks, Speculator
from polyloom.platform.engine.step import Engine
from polyloom.routing.combination import Combination
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams
from polyloom.routing.scheduler.batch import StepPlan

CHUNK = 64
"""Prompts generated together, and kept in one file."""


@dataclass
class _Record:
    output: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


class Recorder(Speculator):
    """Drafts nothing: it only sees each token with the state that it was sampled from."""

    def __init__(self, blocks: DraftBlocks, token_budget: int) -> None:
        super().__init__((), blocks, token_budget)
        self.needs_hidden = True
        self._records: dict[str, _Record] = {}

    def ran(self, plan: StepPlan, results: Sequence[RowResult], seconds: float) -> None:
        for item, result in zip(plan.scheduled, results, strict=True):
            if result.hidden is not None:
                record = self._records.setdefault(item.sequence.sequence_id, _Record())
                record.output += [token.token_id for token in result.sampled]
                record.hidden.append(result.hidden.clone())

    def take(self, sequence_id: str) -> _Record:
        """What was seen of a sequence, once."""
        return self._records.pop(sequence_id)


@dataclass(frozen=True)
class Target:
    """Whose responses: an engine that `recorder` watches, its base and the revision or None."""

    engine: Engine
    recorder: Recorder
    base_digest: str
    adapter: AdapterSource | None
    stop_token_ids: tuple[int, ...]


def target(
    settings: EngineSettings, adapter: AdapterSource | None, stop_token_ids: tuple[int, ...]
) -> Target:
    """An engine of its own in this process. Raises EngineStartError, ModelError."""
    recorders: list[Recorder] = []

    def watching(drafters: Sequence[Drafter], blocks: DraftBlocks, token_budget: int) -> Recorder:
        recorders.append(Recorder(blocks, token_budget))
        return recorders[-1]

    engine = build_engine(msgspec.structs.replace(settings, drafters=()), watching)
    return Target(engine, recorders[0], settings.base_digest, adapter, stop_token_ids)


def responses(
    make_target: Callable[[], Target],
    prompts: Sequence[tuple[int, ...]],
    max_tokens: int,
    folder: Path,
    on_prompts: Callable[[int], None],
) -> Iterator[Response]:
    """One response a prompt, in order, from `folder` where an earlier run left it. The engine is
    closed at the end.

    make_target: makes the engine, which takes seconds; called if something is left to generate.
    on_prompts: told how many more are done.  Raises TrainingError if the engine fails on one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made: Target | None = None
    try:
        for start in range(0, len(prompts), CHUNK):
            chunk = prompts[start : start + CHUNK]
            file = folder / f"responses-{start // CHUNK:04}.safetensors"
            if not file.exists():
                made = made or make_target()
                _save(file, _generate(made, chunk, max_tokens))
            on_prompts(len(chunk))
            yield from _load(file, chunk)
    finally:
        if made is not None:
            made.engine.close()


def _generate(
    target: Target, prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> list[Response]:
    combination = Combination(
        base_digest=target.base_digest,
        template_digest="",
        adapter_digest=None if target.adapter is None else target.adapter.digest,
    )
    for index, prompt in enumerate(prompts):
        request = GenerationRequest(
            sequence_id=str(index),
            tenant="",
            combination=combination,
            adapter=target.adapter,
            prompt=prompt,
            sampling=SamplingParams(
                max_tokens=max_tokens,
                seed=0,
                temperature=0.0,
                stop_token_ids=target.stop_token_ids,
            ),
        )
        refused = target.engine.submit(request)
        if isinstance(refused, Refused):
            raise TrainingError(f"prompt {index + 1}: {refused.message}")
    while target.engine.has_work:
        for event in target.engine.step():
            if isinstance(event, Finished) and event.reason == "error":
                raise TrainingError(f"the engine failed: {event.error}")
    records = [target.recorder.take(str(index)) for index in range(len(prompts))]
    return [
        Response(prompt, tuple(record.output), torch.stack(record.hidden))
        for prompt, record in zip(prompts, records, strict=True)
    ]


def _save(file: Path, chunk: Sequence[Response]) -> None:
    tensors = {}
    for index, response in enumerate(chunk):
        tensors[f"{index}.output"] = torch.tensor(response.output, dtype=torch.int64)
        tensors[f"{index}.hidden"] = response.hidden.cpu()
    partial = file.with_suffix(".partial")
    save_file(tensors, partial)
    partial.replace(file)


def _load(file: Path, prompts: Sequence[tuple[int, ...]]) -> Iterator[Response]:
    tensors = load_file(file)
    for index, prompt in enumerate(prompts):
        output = tuple(tensors[f"{index}.output"].tolist())
        yield Response(prompt, output, tensors[f"{index}.hidden"])
