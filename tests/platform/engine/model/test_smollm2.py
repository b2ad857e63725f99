"""The real base: what the GGUF says survives the conversion, and the logits are transformers'."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from polyloom.platform.engine.model.config import DecoderConfig
from polyloom.platform.engine.model.store import BaseModel

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "<|im_start|>user\nWhat is 12 times 12?<|im_end|>\n<|im_start|>assistant\n",
]

pytestmark = pytest.mark.slow


def test_it_is_what_it_says(smollm2: BaseModel) -> None:
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in smollm2.names
    assert smollm2.eos_token_ids == (2,)
    assert smollm2.config.tied_head
    assert (smollm2.config.num_layers, smollm2.config.max_model_len) == (30, 8192)


def test_tokenizer_and_template(smollm2: BaseModel) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.folder)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    # The vocabulary isolates digits before it splits, so two spaces before one stay together.
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    text = "naïve 你好 🙂\n\n  2026"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_logits_are_transformers(
    smollm2: BaseModel,
    paged_run: Callable[[Path, DecoderConfig, int], object],
    reference_logits: Callable[[Path, Sequence[Sequence[int]]], list[torch.Tensor]],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2.folder)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    run = paged_run(smollm2.folder, smollm2.config, len(prompts))
    first = run.step([prompt[:3] for prompt in prompts])
    rest = run.step([prompt[3:] for prompt in prompts])
    for head, tail, reference in zip(
        first, rest, reference_logits(smollm2.folder, prompts), strict=True
    ):
        ours = torch.cat([head, tail]).log_softmax(-1)
        assert (ours - reference.log_softmax(-1)).abs().max().item() < 2e-4
        assert ours[-1].argmax() == reference[-1].argmax()
