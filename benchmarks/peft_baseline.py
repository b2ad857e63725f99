"""PEFT's own way of mixing adapters in one batch: `generate(adapter_names=[…])`."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class BaselineResult:
    """One timed `generate`."""

    seconds: float
    output_tokens: int

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


class PeftBaseline:
    """The base with several adapters loaded; rows choose theirs by name."""

    def __init__(self, base: Path, adapters: Sequence[Path], dtype: torch.dtype) -> None:
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        self._names = [f"a{index}" for index in range(len(adapters))]
        self._model = PeftModel.from_pretrained(model, adapters[0], adapter_name=self._names[0])
        for name, path in zip(self._names[1:], adapters[1:], strict=True):
            self._model.load_adapter(path, adapter_name=name)
        self._model.eval()
        if dtype is not torch.float32:
            self._model.to(dtype)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> BaselineResult:
        """Greedy `new_tokens` for every prompt, row i on adapter i modulo their number."""
        rows = torch.tensor([list(prompt) for prompt in prompts])
        names = [self._names[index % len(self._names)] for index in range(len(prompts))]
        start = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=rows,
                attention_mask=torch.ones_like(rows),
                adapter_names=names,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                do_sample=False,
            )
        seconds = time.perf_counter() - start
        return BaselineResult(seconds, (output.shape[1] - rows.shape[1]) * len(prompts))
