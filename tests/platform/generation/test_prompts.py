"""Who renders: only the base's own template is trusted with this process."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.prompts import PromptFormats, shipped_template
from polyloom.platform.generation.template_workers import TemplateWorkers
from polyloom.platform.generation.tokenizers import TokenizerCache
from polyloom.routing.combination import Combination
from polyloom.routing.request import CacheOwner
from polyloom.routing.resolver import Resolution

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def workers() -> AsyncIterator[TemplateWorkers]:
    workers = TemplateWorkers(render_seconds=0.5)
    yield workers
    await workers.close()


def resolution(tokenizer: Path, template: Path) -> Resolution:
    return Resolution(
        combination=Combination(base_digest="sha256:0", template_digest="sha256:1"),
        adapter=None,
        label="m",
        base_name="m",
        adapter_name=None,
        revision=None,
        route_version=1,
        tokenizer_folder=str(tokenizer),
        template_folder=str(template),
        owner=CacheOwner("tenant", "acme"),
    )


async def test_only_what_is_not_the_base_s_goes_to_a_worker(
    workers: TemplateWorkers, tiny_llama_folder: Path, tmp_path: Path
) -> None:
    formats = PromptFormats(TokenizerCache(), tiny_llama_folder, workers)
    base = await formats.get(resolution(tiny_llama_folder, tiny_llama_folder))
    expected = await base.render(MESSAGES, "t")

    same = tmp_path / "same"  # what `save_pretrained` puts beside most adapters
    same.mkdir()
    text = shipped_template(tiny_llama_folder)
    assert text is not None
    (same / "chat_template.jinja").write_text(text)
    copied = await formats.get(resolution(tiny_llama_folder, same))
    assert await copied.render(MESSAGES, "t") == expected
    assert workers.pids == []

    own = tmp_path / "own"
    own.mkdir()
    (own / "chat_template.jinja").write_text("{% for i in range(9) %}" * 12 + "{% endfor %}" * 12)
    hostile = await formats.get(resolution(tiny_llama_folder, own))
    with pytest.raises(InvalidRequest, match=r"chat template takes longer than 0\.5 s"):
        await hostile.render(MESSAGES, "t")


async def test_a_tokenizer_s_own_template_is_its_revision_s(
    workers: TemplateWorkers, tiny_llama_folder: Path, tmp_path: Path
) -> None:
    """A base without a template: what a revision's tokenizer brings is still no operator's."""
    base, revision = tmp_path / "base", tmp_path / "revision"
    for folder in (base, revision):
        shutil.copytree(tiny_llama_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / "chat_template.jinja").unlink()
    formats = PromptFormats(TokenizerCache(), base, workers)
    loaded = await formats.get(resolution(revision, revision))
    loaded._template = "{{ messages[0].content }}"
    assert await loaded.render(MESSAGES, "t") == "Hi"
    assert len(workers.pids) == 1
