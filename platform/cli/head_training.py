"""Training a draft head from the command line: its inputs found, its progress shown."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import rich_click as click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from polyloom.adapters.draft_heads.checkpoint import DraftHead, read_draft_head
from polyloom.adapters.draft_heads.config import DraftHeadConfig
from polyloom.adapters.errors import InvalidAdapterError
from polyloom.adapters.source import AdapterSource
from polyloom.adapters.validation import load_adapter_weights
from polyloom.platform.cli.client import Server, name_path
from polyloom.platform.cli.draft_heads import revision_of
from polyloom.platform.cli.pulling import pull_with_progress
from polyloom.platform.engine.draft_heads.training.fit import FitConfig
from polyloom.platform.engine.draft_heads.training.job import HeadShape, Stage, TrainingJob, train
from polyloom.platform.engine.draft_heads.training.responses import target
from polyloom.platform.engine.errors import EngineError
from polyloom.platform.engine.model.layout import base_layout
from polyloom.platform.engine.model.store import BaseModel
from polyloom.platform.engine.model.weights import FusedWeights
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.prompts import shipped_template
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.platform.services.blobs import BlobStore
from polyloom.platform.settings import DEFAULT_DATA_DIR

DEFAULT_BASE = "smollm2-135m-instruct"
HELD_OUT_SHARE = 10
KV_MEMORY = 1 << 29
ADAPTER_MEMORY = 1 << 28


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """The command's options."""

    base: str | None
    adapter: str | None
    shared: Path | None
    prompts: Path
    held_out: Path | None
    out: Path
    minutes: float | None
    epochs: int
    max_tokens: int
    rank: int
    threads: int
    data_dir: Path | None


def train_head(inputs: TrainingInputs, server: Server) -> DraftHeadConfig:
    """Train, judge and save; the saved head's config. Ends the command where inputs are wrong."""
    torch.set_num_threads(inputs.threads)
    data_dir = inputs.data_dir or DEFAULT_DATA_DIR
    base = pull_with_progress(inputs.base or DEFAULT_BASE, data_dir)
    adapter, shared = _adapter(inputs, server, base, data_dir)
    conversations = _Prompts(base.folder, None if adapter is None else Path(adapter.path))
    learned = conversations.read(inputs.prompts)
    if inputs.held_out is None:
        learned, held_out = _split(learned)
    else:
        held_out = conversations.read(inputs.held_out)
    settings = _settings(base, inputs.threads)
    job = TrainingJob(
        model_folder=base.folder,
        base_name=base.name,
        base_digest=base.digest,
        config=base.config,
        adapter=adapter,
        shared=shared,
        prompts=learned,
        held_out=held_out,
        work=data_dir / "draft-head-training",
        target=lambda: target(settings, adapter, base.eos_token_ids),
        max_tokens=inputs.max_tokens,
        shape=HeadShape(rank=inputs.rank),
        fit=FitConfig(
            epochs=inputs.epochs,
            seconds=None if inputs.minutes is None else 60 * inputs.minutes,
        ),
    )
    try:
        with _shown() as progress:
            return train(job, inputs.out, progress).config
    except EngineError as error:
        raise click.ClickException(str(error)) from error


def _adapter(
    inputs: TrainingInputs, server: Server, base: BaseModel, data_dir: Path
) -> tuple[AdapterSource | None, DraftHead | None]:
    """The adapter's files and the shared head; both None for a shared head's training."""
    if inputs.adapter is None:
        return None, None
    shared_folder = inputs.shared
    if Path(inputs.adapter).is_dir():
        source = _local(Path(inputs.adapter), base)
    else:
        source, stored = _served(inputs.adapter, server, data_dir)
        shared_folder = shared_folder or stored
    if shared_folder is None:
        raise click.ClickException("there is no shared head to train on: give one with --shared")
    try:
        return source, read_draft_head(shared_folder)
    except InvalidAdapterError as error:
        raise click.ClickException(f"{shared_folder}: {error}") from error


def _local(folder: Path, base: BaseModel) -> AdapterSource:
    layout = base_layout(base.config, name=base.name, digest=base.digest, other_names=base.names)
    weights = FusedWeights(base.folder, base.config, torch.float32)
    try:
        digest = load_adapter_weights(folder, layout, weights, None).digest
    except InvalidAdapterError as error:
        raise click.ClickException(f"{folder}: {error}") from error
    return AdapterSource(digest, str(folder))


def _served(reference: str, server: Server, data_dir: Path) -> tuple[AdapterSource, Path | None]:
    """A revision of the server whose files are in this data directory, and its shared head's."""
    name, number = revision_of(server, reference)
    path = f"/v1/adapters/{name_path(name)}/revisions/{number}"
    revision = server.call("GET", path)
    heads = server.call("GET", f"{path}/draft-heads")
    blobs = BlobStore(data_dir)
    digests = [revision["digest"], heads["shared_digest"]]
    for digest in digests:
        if digest is not None and not blobs.holds(digest):
            raise click.ClickException(
                f"{digest} of {reference} is not in {data_dir}: give the server's --data-dir, or"
                " folders with --adapter and --shared"
            )
    shared = None if heads["shared_digest"] is None else blobs.path(heads["shared_digest"])
    return AdapterSource(revision["digest"], str(blobs.path(revision["digest"]))), shared


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a prompts file: a conversation, or text that is continued as it is."""

    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None


class _Prompts:
    """Reads prompts files into token ids, as the server would render and tokenise them."""

    def __init__(self, base: Path, adapter: Path | None) -> None:
        own_tokenizer = adapter is not None and (adapter / "tokenizer.json").exists()
        tokenizer = TextTokenizer(adapter if own_tokenizer and adapter else base)
        template = None if adapter is None else shipped_template(adapter)
        self._format = ChatTemplate(tokenizer, template or shipped_template(base))

    def read(self, file: Path) -> tuple[tuple[int, ...], ...]:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
        return tuple(self._ids(file, number, line) for number, line in enumerate(lines, 1))

    def _ids(self, file: Path, number: int, text: str) -> tuple[int, ...]:
        try:
            line = msgspec.json.decode(text, type=_Line | str)
            if isinstance(line, str):
                line = _Line([{"role": "user", "content": line}])
            if (line.messages is None) == (line.prompt is None):
                raise InvalidRequest("give either messages or a prompt")
            if line.messages is None:
                ids = self._format.tokenizer.encode_now(line.prompt or "", special_tokens=True)
            else:
                rendered = asyncio.run(self._format.render(line.messages, ""))
                ids = self._format.tokenizer.encode_now(rendered, special_tokens=False)
        except (msgspec.MsgspecError, InvalidRequest) as error:
            raise click.ClickException(f"{file}, line {number}: {error}") from error
        return tuple(ids)


def _split(
    prompts: Sequence[tuple[int, ...]],
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Every tenth prompt is held out, the same ones each time."""
    order = list(dict.fromkeys(prompts))
    random.Random(0).shuffle(order)
    held_out = order[::HELD_OUT_SHARE]
    kept = set(order) - set(held_out)
    return tuple(p for p in prompts if p in kept), tuple(held_out)


def _settings(base: BaseModel, threads: int) -> EngineSettings:
    """An engine in this process; the address is never bound."""
    return EngineSettings(
        model_folder=str(base.folder),
        base_name=base.name,
        base_digest=base.digest,
        address="ipc:///nowhere",
        kv_memory=KV_MEMORY,
        adapter_memory=ADAPTER_MEMORY,
        threads=threads,
        prefix_cache=False,
    )


class _Bars:
    """A bar a stage."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._tasks: dict[Stage, TaskID] = {}

    def begin(self, stage: Stage, total: int) -> None:
        self._tasks[stage] = self._progress.add_task(stage, total=total, note="")

    def advance(self, stage: Stage, done: float, note: str = "") -> None:
        self._progress.update(self._tasks[stage], advance=done, note=note)


@contextmanager
def _shown() -> Iterator[_Bars]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}% {task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield _Bars(progress)
