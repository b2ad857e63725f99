"""What the operator chose, checked once at start and never read again from the environment."""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from polyloom.routing.drafts import MAX_DRAFT_TOKENS, DraftPolicy

GIB = 1 << 30
ENV_PREFIX = "POLYLOOM_"
CLIENT_VARIABLES = frozenset({"POLYLOOM_URL", "POLYLOOM_API_KEY"})
"""Read by the command line when it talks to a server; they are no settings of the server."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b?|b)?", re.IGNORECASE)
_SIZE_FACTOR = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_SIZES = ("kv_memory", "adapter_memory", "upload_limit")


MAX_ENGINES = 8
DEFAULT_DATA_DIR = Path.home() / ".local" / "share" / "polyloom"


class SettingsError(ValueError):
    """A setting that stops the start; `name` is the setting as the operator wrote it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `polyloom serve`; every field is an option and a `POLYLOOM_*` variable.

    Memory sizes and the upload limit are bytes; None stands for the device's default.
    request_deadline: seconds from arrival to the last token.
    itl_target: seconds between two tokens of an answer that long prompts are cut up for.
    engines: processes that each hold the base; memory, queue and running limits are of each.
    prefix_cache: reuse the KV of prompts that begin alike, within one namespace.
    draft_model: a smaller model of the same tokenizer that drafts for the base; a folder.
    drafts: how tokens are drafted where neither a request nor its route says. No text depends on it.
    admin_key: None makes the first start write one into the data directory.
    """

    base: str
    host: str = "127.0.0.1"
    port: int = 8000
    data_dir: Path = DEFAULT_DATA_DIR
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    kv_dtype: Literal["auto", "int8"] = "auto"
    database_url: str | None = None
    redis_url: str | None = None
    admin_key: str | None = None
    kv_memory: int | None = None
    adapter_memory: int | None = None
    block_size: int = 16
    token_budget: int | None = None
    max_running: int | None = None
    max_model_len: int | None = None
    queue_limit: int = 1024
    request_deadline: float = 600.0
    upload_limit: int = 2 * GIB
    max_rank: int = 256
    itl_target: float = 0.1
    engines: int = 1
    prefix_cache: bool = True
    draft_model: Path | None = None
    drafts: DraftPolicy = "adaptive"

    def __post_init__(self) -> None:
        if not self.base:
            raise SettingsError("base", "needs a model name, folder, hub id or .gguf file")
        if not 0 <= self.port <= 65535:
            raise SettingsError("port", f"{self.port} is not between 0 and 65535")
        for name in ("block_size", "queue_limit", "max_rank", "upload_limit", "request_deadline"):
            if getattr(self, name) <= 0:
                raise SettingsError(name, f"{getattr(self, name)} is not positive")
        if not 1 <= self.engines <= MAX_ENGINES:
            raise SettingsError("engines", f"{self.engines} is not between 1 and {MAX_ENGINES}")
        for name in ("kv_memory", "adapter_memory", "token_budget", "max_running", "max_model_len"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise SettingsError(name, f"{value} is not positive")
        if not 0 < self.itl_target < math.inf:
            raise SettingsError("itl_target", f"{self.itl_target} is not positive and finite")
        if self.draft_model is not None and not (self.draft_model / "config.json").is_file():
            raise SettingsError("draft_model", f"{self.draft_model} is no folder of a model")
        if isinstance(self.drafts, int) and not 0 <= self.drafts <= MAX_DRAFT_TOKENS:
            raise SettingsError("drafts", f"{self.drafts} is not between 0 and {MAX_DRAFT_TOKENS}")
        if self.admin_key is not None and len(self.admin_key) < 16:
            raise SettingsError("admin_key", "is shorter than 16 characters")


def default_database_url(data_dir: Path) -> str:
    """The record when no other is named: SQLite in the data directory."""
    return f"sqlite:///{data_dir.absolute() / 'polyloom.db'}"


def load_settings(
    options: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from given options (None: not given), then `POLYLOOM_*`, then the defaults.

    Raises SettingsError naming an unknown variable or the setting whose value is wrong.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, tuple[str, Any]] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable in CLIENT_VARIABLES:
            continue
        if not text:  # how compose files write "not set"
            continue
        field = variable.removeprefix(ENV_PREFIX).lower()
        if field not in Settings.__struct_fields__:
            raise SettingsError(variable, "is not a setting of this version")
        values[field] = (variable, text)
    for field, value in options.items():
        if value is not None:
            values[field] = ("--" + field.replace("_", "-"), value)
    if "base" not in values:
        raise SettingsError("--base", "is required (or POLYLOOM_BASE)")
    return Settings(**{field: _convert(field, *given) for field, given in values.items()})


def _convert(field: str, origin: str, value: Any) -> Any:
    if field in _SIZES and isinstance(value, str):
        value = _parse_size(origin, value)
    try:
        return msgspec.convert(value, _FIELD_TYPES[field], strict=False, dec_hook=_path)
    except msgspec.ValidationError as error:
        raise SettingsError(origin, f"{value!r} is wrong: {error}") from None


def _path(kind: type, value: Any) -> Path:
    return Path(value).expanduser()


def _parse_size(origin: str, text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise SettingsError(origin, f"{text!r} is not a size such as 512MiB, 4GiB or a byte count")
    unit = (match[2] or "").lower()[:1]
    return int(float(match[1]) * _SIZE_FACTOR[unit])


_FIELD_TYPES = {field.name: field.type for field in msgspec.structs.fields(Settings)}
