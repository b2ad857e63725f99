"""One verdict: the same tokens through the engine and through PEFT."""

import time
from dataclasses import replace
from pathlib import Path

import torch
from peft import LoraConfig

from polyloom.adapters.base_layout import BaseLayout, ModuleGroup
from polyloom.adapters.errors import AdapterError
from polyloom.adapters.inspection import Inspection, inspect_folder
from polyloom.adapters.kernels.choice import LoraChoice, choose_lora_op
from polyloom.adapters.kernels.reference import ReferenceLoraOp
from polyloom.adapters.validation import load_adapter_weights
from polyloom.adapters.weights import AdapterWeights
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.fidelity.engine_side import EngineSide
from polyloom.platform.engine.fidelity.errors import UncheckableError
from polyloom.platform.engine.fidelity.messages import Check, FidelitySettings, Verdict
from polyloom.platform.engine.fidelity.peft_side import PeftSide
from polyloom.platform.engine.fidelity.probe import probe_sequences
from polyloom.platform.engine.kernels.cpu import CpuOps
from polyloom.platform.engine.kernels.ops import EngineOps, ReferenceOps
from polyloom.platform.engine.model.families import read_config
from polyloom.platform.engine.model.layout import base_layout

_PEFT_PREFIX = "base_model.model."


class FidelityCheck:
    """One base on both sides, ready for one adapter after another."""

    def __init__(self, settings: FidelitySettings) -> None:
        """Loads the base twice, or neither time if `memory_bytes` does not allow it.

        Raises ModelError when the base cannot be served.
        """
        folder = Path(settings.model_folder)
        config = read_config(folder)
        self._layout = base_layout(config, name=settings.base_name, digest=settings.base_digest)
        self._sequences = probe_sequences(folder, config.vocab_size)
        self._streamed = 2 * _base_bytes(self._layout) > settings.memory_bytes
        self._engine = EngineSide(
            folder,
            config,
            self._layout,
            _engine_ops(settings),
            _lora_choice(settings),
            streamed=self._streamed,
        )
        self._peft = PeftSide(folder, streamed=self._streamed)

    def run(self, check: Check) -> Verdict:
        """Raises UncheckableError when either side cannot apply the adapter."""
        started = time.perf_counter()
        folder = Path(check.folder)
        try:
            inspection = inspect_folder(folder, self._layout)
            weights = load_adapter_weights(folder, self._layout, self._engine.base, check.digest)
        except AdapterError as error:
            raise UncheckableError(str(error)) from error
        difference, effect = self._compare(inspection, weights)
        return Verdict(
            digest=check.digest,
            max_logprob_diff=difference,
            max_effect=effect,
            probe_tokens=sum(len(s) for s in self._sequences),
            seconds=time.perf_counter() - started,
            streamed=self._streamed,
        )

    def _compare(self, inspection: Inspection, weights: AdapterWeights) -> tuple[float, float]:
        adapted, bare = self._engine.logprobs(weights, self._sequences)
        expected = self._peft.logprobs(
            _config_for_base(inspection), _tensors_for_base(inspection), self._sequences
        )
        return _largest(adapted, expected), _largest(adapted, bare)


def _base_bytes(layout: BaseLayout) -> int:
    """Bytes of a base's matrices in fp32; its norms and biases are small change."""
    elements = layout.vocab_size * layout.hidden_size
    for shape in layout.groups:
        if shape.group is not ModuleGroup.HEAD or not layout.tied_head:
            elements += shape.layers * shape.out_features * shape.in_features
    return elements * torch.float32.itemsize


def _largest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    # torch's max keeps a NaN, Python's would lose it.
    return float(torch.stack([(a - b).abs().max() for a, b in pairs]).max())


def _engine_ops(settings: FidelitySettings) -> EngineOps:
    if settings.implementation == "reference":
        return ReferenceOps(Capabilities())
    return CpuOps(Capabilities())


def _lora_choice(settings: FidelitySettings) -> LoraChoice:
    if settings.implementation == "reference":
        return LoraChoice(ReferenceLoraOp())
    return choose_lora_op(torch.float32, torch.device("cpu"))


def _config_for_base(inspection: Inspection) -> LoraConfig:
    """The adapter's own config; where it was trained on a model that names its modules otherwise,
    the same targets and ranks spelled out in this base's names."""
    config = inspection.spec.config
    if inspection.naming.is_canonical:
        return replace(config, inference_mode=True)
    targets = [module.target for module in inspection.modules]
    return replace(
        config,
        inference_mode=True,
        target_modules=[t.name for t in targets],
        exclude_modules=None,
        layers_to_transform=None,
        layers_pattern=None,
        rank_pattern={f"^{t.name}": t.rank for t in targets},
        alpha_pattern={f"^{t.name}": t.alpha for t in targets},
    )


def _tensors_for_base(inspection: Inspection) -> dict[str, torch.Tensor]:
    with inspection.checkpoint.reading() as reader:
        return {
            _PEFT_PREFIX + name: reader.read(entry).float() for name, entry in inspection.tensors()
        }
