"""PEFT's side of the comparison: a `PeftModel` on the transformers model, fp32."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel

from polyloom.platform.engine.fidelity.errors import UncheckableError
from polyloom.platform.engine.fidelity.streamed_peft import hollow_model, streaming
from polyloom.platform.engine.model.checkpoint import Checkpoint

_DTYPE = torch.float32


class PeftSide:
    """The base as transformers loads it; each check puts one adapter on it and takes it off."""

    def __init__(self, folder: Path, *, streamed: bool) -> None:
        self._checkpoint = Checkpoint(folder) if streamed else None
        self._model = hollow_model(folder) if streamed else _whole_model(folder)

    def logprobs(
        self,
        config: LoraConfig,
        tensors: Mapping[str, torch.Tensor],
        sequences: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """Logprobs `[len, vocab]` of each sequence under the adapter.

        tensors: as PEFT names them in a model of this base, e.g.
        `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
        Raises UncheckableError when PEFT cannot apply them.
        """
        with self._adapted(config, tensors) as model, torch.inference_mode():
            return [self._run(model, sequence) for sequence in sequences]

    @contextmanager
    def _adapted(
        self, config: LoraConfig, tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[PeftModel]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = get_peft_model(self._model, config, low_cpu_mem_usage=True)
                result = set_peft_model_state_dict(model, dict(tensors), low_cpu_mem_usage=True)
        except Exception as error:  # whatever PEFT finds wrong with an adapter, in its own words
            raise UncheckableError(f"PEFT cannot apply the adapter: {error}") from error
        try:
            missing = [key for key in result.missing_keys if ".lora_" in key]
            if unfit := sorted([*missing, *result.unexpected_keys]):
                raise UncheckableError(f"PEFT does not place the adapter's tensors: {unfit[:5]}")
            yield model.eval()
        finally:
            self._model = model.unload()

    def _run(self, model: PeftModel, sequence: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([sequence])
        if self._checkpoint is None:
            logits = model(ids, use_cache=False).logits
        else:
            with streaming(model.get_base_model(), self._checkpoint):
                logits = model(ids, use_cache=False).logits
        result: torch.Tensor = torch.log_softmax(logits[0].float(), dim=-1)
        return result


def _whole_model(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPE, local_files_only=True)
    return model.eval()
