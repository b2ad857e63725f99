"""What the decoder promises beside parity: where adapters act, and which dtypes come out."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from polyloom.adapters.base_layout import ModuleGroup
from polyloom.adapters.segments import LoraBatch
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.layout import base_layout


class Recorder:
    """A hook that shifts every output, and remembers what it was shown."""

    def __init__(self) -> None:
        self.calls: list[tuple[ModuleGroup, int, tuple[int, ...], tuple[int, ...]]] = []

    def apply(
        self,
        group: ModuleGroup,
        layer: int,
        x: torch.Tensor,
        y: torch.Tensor,
        batch: LoraBatch,
        bias: torch.Tensor | None = None,
    ) -> None:
        self.calls.append((group, layer, tuple(x.shape), tuple(y.shape)))
        y.add_(1.0)


def some_adapter(tokens: int) -> LoraBatch:
    pages = torch.zeros(1, 1, dtype=torch.int32)
    return LoraBatch(
        starts=torch.tensor([0, tokens], dtype=torch.int32),
        slots=torch.zeros(1, dtype=torch.int32),
        pages={ModuleGroup.QKV: pages},
        rows=frozenset(),
    )


def test_adapters_see_every_fused_linear_once(
    tiny_llama_folder: Path, paged_run: Callable[..., object]
) -> None:
    config = read_config(tiny_llama_folder)
    run = paged_run(tiny_llama_folder, config, 1)
    batch, token_ids = run._batch([[3, 4, 5]])
    hook, lora = Recorder(), some_adapter(3)
    hidden = run.decoder.forward(token_ids, batch, lora, run.attention, hook)
    plain = run.decoder.logits(hidden, LoraBatch(lora.starts, lora.slots, {}, frozenset()), hook)
    shifted = run.decoder.logits(hidden, lora, hook)

    layout = base_layout(config, name="tiny", digest="sha256:0")
    expected = {
        (shape.group, layer, (3, shape.in_features), (3, shape.out_features))
        for shape in layout.groups
        for layer in range(shape.layers)
    }
    assert len(hook.calls) == len(expected)
    assert set(hook.calls) == expected
    torch.testing.assert_close(shifted, plain + 1.0)


@pytest.mark.parametrize(
    "group", [ModuleGroup.QKV, ModuleGroup.OUT, ModuleGroup.GATE_UP, ModuleGroup.DOWN]
)
def test_what_adapters_add_reaches_the_logits(
    group: ModuleGroup, tiny_llama_folder: Path, paged_run: Callable[..., object]
) -> None:
    class OneGroup(Recorder):
        def apply(self, called: ModuleGroup, *arguments: object, **named: object) -> None:
            if called is group:
                super().apply(called, *arguments, **named)

    results = []
    for hook in (Recorder(), OneGroup()):
        run = paged_run(tiny_llama_folder, read_config(tiny_llama_folder), 1)
        batch, token_ids = run._batch([[3, 4, 5]])
        lora = some_adapter(3)
        if isinstance(hook, OneGroup):
            results.append(run.decoder.forward(token_ids, batch, lora, run.attention, hook))
        else:
            nothing = LoraBatch(lora.starts, lora.slots, {}, frozenset())
            results.append(run.decoder.forward(token_ids, batch, nothing, run.attention, hook))
            assert hook.calls == []
    assert (results[0] - results[1]).abs().max() > 1e-3


PROMPTS = [[3, 77, 200, 9], list(range(20, 53)), [500]]


@torch.no_grad()
def transformers_logits(folder: Path, dtype: torch.dtype) -> list[torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return [model(torch.tensor([prompt])).logits[0].float() for prompt in PROMPTS]


def largest_difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def test_cpu_ops_in_fp32(tiny_llama_folder: Path, paged_run: Callable[..., object]) -> None:
    config = read_config(tiny_llama_folder)
    run = paged_run(tiny_llama_folder, config, len(PROMPTS), implementation="cpu")
    exact = transformers_logits(tiny_llama_folder, torch.float32)
    assert largest_difference(run.step(PROMPTS), exact) < 3e-5


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_bf16_is_as_near_to_fp32_as_transformers_bf16(
    implementation: str, tiny_llama_folder: Path, paged_run: Callable[..., object]
) -> None:
    config = read_config(tiny_llama_folder)
    run = paged_run(
        tiny_llama_folder,
        config,
        len(PROMPTS),
        dtype=torch.bfloat16,
        implementation=implementation,
    )
    ours = run.step(PROMPTS)
    assert all(logits.dtype is torch.float32 for logits in ours)
    exact = transformers_logits(tiny_llama_folder, torch.float32)
    rounded = transformers_logits(tiny_llama_folder, torch.bfloat16)
    assert 0 < largest_difference(ours, exact) < 1.5 * largest_difference(rounded, exact)
