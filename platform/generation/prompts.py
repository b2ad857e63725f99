"""The prompt format of a resolution: which tokenizer and which chat template it is served with."""

import asyncio
from pathlib import Path

import msgspec

from polyloom.platform.generation.template_workers import TemplateWorkers
from polyloom.platform.generation.templates import ChatTemplate
from polyloom.platform.generation.tokenizers import TokenizerCache
from polyloom.routing.resolver import Resolution


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    chat_template: str | list[_NamedTemplate] | None = None


def shipped_template(folder: Path) -> str | None:
    """The chat template among a folder's files, where transformers keeps it; None if there is none.

    Raises OSError, UnicodeDecodeError or msgspec.DecodeError for files that cannot be read.
    """
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    declared = msgspec.json.decode(config.read_bytes(), type=_TokenizerConfig).chat_template
    if isinstance(declared, list):
        return next((t.template for t in declared if t.name == "default"), None)
    return declared


class PromptFormats:
    """Prompt formats by the folders they come from. Folders are content-addressed."""

    def __init__(
        self, tokenizers: TokenizerCache, base_folder: Path, workers: TemplateWorkers
    ) -> None:
        """base_folder: has the template of what ships a tokenizer but no template.

        workers: render every template that is not the base's, word for word.
        """
        self._tokenizers = tokenizers
        self._base_folder = base_folder
        self._workers = workers
        self._formats: dict[tuple[str, str], ChatTemplate] = {}

    async def get(self, resolution: Resolution) -> ChatTemplate:
        """Tokenizer and template of a resolution. Raises TokenizerUnusable."""
        key = (resolution.tokenizer_folder, resolution.template_folder)
        known = self._formats.get(key)
        return known if known is not None else await self._load(key)

    async def _load(self, key: tuple[str, str]) -> ChatTemplate:
        tokenizer = await self._tokenizers.get(Path(key[0]))
        base = await asyncio.to_thread(shipped_template, self._base_folder)
        own = await asyncio.to_thread(shipped_template, Path(key[1]))
        template = base if own is None else own
        # Without either text the tokenizer has its own, which may be the revision's.
        trusted = template == base and (base is not None or Path(key[0]) == self._base_folder)
        if len(self._formats) >= 1024:
            self._formats.pop(next(iter(self._formats)))
        loaded = ChatTemplate(tokenizer, template, None if trusted else self._workers)
        self._formats[key] = loaded
        return loaded
