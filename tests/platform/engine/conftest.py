"""An engine on the tiny Llama, in this process, and requests for it."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from polyloom.adapters.config import PAGE_RANKS
from polyloom.adapters.source import AdapterSource
from polyloom.adapters.validation import ValidationLimits, validate
from polyloom.platform.engine.assembly import build_engine
from polyloom.platform.engine.messages import Finished, TokenLogprob, Tokens
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.layout import base_layout
from polyloom.platform.engine.model.weights import FusedWeights
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.step import Engine
from polyloom.routing.combination import Combination
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams

BASE_DIGEST = "sha256:tiny"
_ids = itertools.count()


@dataclass
class Answer:
    """What an engine said of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Finished | None = None


def make_request(
    prompt: tuple[int, ...], *, adapter: AdapterSource | None = None, **options: object
) -> GenerationRequest:
    """A request with an id of its own; options are sampling parameters, or `deadline`, `id`,
    `template`, `cache`, `hold` or `grammar`."""
    deadline = options.pop("deadline", None)
    cache, hold = options.pop("cache", None), options.pop("hold", None)
    grammar = options.pop("grammar", None)
    template = options.pop("template", "sha256:template")
    sequence_id = options.pop("id", f"sequence-{next(_ids)}")
    digest = None if adapter is None else adapter.digest
    return GenerationRequest(
        sequence_id=sequence_id,  # type: ignore[arg-type]
        tenant="tenant",
        combination=Combination(BASE_DIGEST, template, digest),  # type: ignore[arg-type]
        adapter=adapter,
        prompt=prompt,
        sampling=SamplingParams(**{"max_tokens": 8, "seed": 0, "temperature": 0.0, **options}),  # type: ignore[arg-type]
        deadline=deadline,  # type: ignore[arg-type]
        cache=cache,  # type: ignore[arg-type]
        hold=hold,  # type: ignore[arg-type]
        grammar=grammar,  # type: ignore[arg-type]
    )


def run_all(engine: Engine, requests: list[GenerationRequest]) -> list[Answer]:
    """Submit all at once and step until everything has ended; answers in the same order."""
    answers = {request.sequence_id: Answer() for request in requests}
    for request in requests:
        assert engine.submit(request) is None
    while engine.has_work:
        for event in engine.step():
            answer = answers[event.sequence_id]
            if isinstance(event, Tokens):
                assert answer.end is None
                answer.token_ids += event.token_ids
                answer.logprobs += event.logprobs
                answer.prompt_logprobs += event.prompt_logprobs
            else:
                assert isinstance(event, Finished)
                answer.end = event
    engine.check_idle()
    return [answers[request.sequence_id] for request in requests]


@pytest.fixture(scope="session")
def request_factory() -> Callable[..., GenerationRequest]:
    return make_request


@pytest.fixture(scope="session")
def run() -> Callable[[Engine, list[GenerationRequest]], list[Answer]]:
    return run_all


@pytest.fixture(scope="session")
def settings_factory(tiny_llama_folder: Path) -> Callable[..., EngineSettings]:
    """Settings for the tiny Llama in fp32; a block of 16 tokens has 6 KiB."""

    def make(**options: object) -> EngineSettings:
        defaults = {
            "model_folder": str(tiny_llama_folder),
            "base_name": "tiny",
            "base_digest": BASE_DIGEST,
            "address": "ipc:///nowhere/engine.sock",
            "kv_memory": 4 << 20,
            "adapter_memory": 4 << 20,
            "threads": 1,
            "dtype": "float32",
            "implementation": "reference",
            "token_budget": 64,
            "max_running": 16,
        }
        return EngineSettings(**defaults | options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def engine_factory(
    settings_factory: Callable[..., EngineSettings],
) -> Iterator[Callable[..., Engine]]:
    """Builds engines and closes them after the test."""
    engines: list[Engine] = []

    def make(**options: object) -> Engine:
        engines.append(build_engine(settings_factory(**options)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def adapter_factory(
    tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AdapterSource]:
    """Random PEFT adapters of the tiny Llama by (rank, seed, target modules), with a strong
    effect."""
    config = read_config(tiny_llama_folder)
    layout = base_layout(config, name=tiny_llama_folder.name, digest=BASE_DIGEST)
    base = FusedWeights(tiny_llama_folder, config, torch.float32)

    def make(rank: int, seed: int, targets: str | list[str] = "all-linear") -> AdapterSource:
        folder = tmp_path_factory.mktemp("adapter")
        model = AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32)
        lora = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        adapted = get_peft_model(model, lora)
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
        adapted.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        limits = ValidationLimits(max_rank=8 * PAGE_RANKS)
        return AdapterSource(validate(folder, layout, base, limits).digest, str(folder))

    return make
