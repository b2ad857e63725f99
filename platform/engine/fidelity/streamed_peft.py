"""A transformers model whose weights are read from disk one decoder layer at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from polyloom.platform.engine.model.checkpoint import Checkpoint
from polyloom.platform.engine.model.layout import EMBEDDING_PATH, HEAD_PATH, LAYER_PREFIX

_BASE_LAYER = ".base_layer"


def hollow_model(folder: Path) -> PreTrainedModel:
    """The model without its weights: each is one number seen in the right shape.

    Not on the meta device, since PEFT puts an adapter on the device of the layer it adapts.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    # Buffers (rotary frequencies) are computed, not stored: they are small and stay.
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            hollow = torch.zeros(()).expand(parameter.shape)
            setattr(module, name, nn.Parameter(hollow, requires_grad=False))
    return model.eval()


def _is_hollow(parameter: nn.Parameter) -> bool:
    return parameter.untyped_storage().nbytes() < parameter.nbytes


@contextmanager
def streaming(model: PreTrainedModel, checkpoint: Checkpoint) -> Iterator[None]:
    """While this lasts, each unit of `model` has its weights only during its own forward.

    Units are the decoder layers, and each other module that has weights. Only hollow weights are
    read, as fp32: what an adapter added is there already.
    """
    handles = []
    try:
        for path, module in _units(model):
            unit = _Unit(path, module, model, checkpoint)
            handles.append(module.register_forward_pre_hook(unit.read, with_kwargs=True))
            handles.append(module.register_forward_hook(unit.drop, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _units(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    inner, _, layers = LAYER_PREFIX.rpartition(".")
    for path, module in model.named_children():
        if path != inner:
            yield path, module
    for name, module in model.get_submodule(inner).named_children():
        if name != layers:
            yield f"{inner}.{name}", module
    for index, module in model.get_submodule(LAYER_PREFIX).named_children():
        yield f"{LAYER_PREFIX}.{index}", module


class _Unit:
    """One module's placeholders, and the hooks that fill and empty them."""

    def __init__(
        self, path: str, module: nn.Module, model: PreTrainedModel, checkpoint: Checkpoint
    ) -> None:
        self._tied = bool(model.config.tie_word_embeddings)
        self._checkpoint = checkpoint
        self._placeholders = [
            (owner, leaf, parameter, self._stored_name(f"{path}.{name}".rstrip("."), leaf))
            for name, owner in module.named_modules()
            for leaf, parameter in owner.named_parameters(recurse=False)
            if _is_hollow(parameter)
        ]

    def read(self, *_: object) -> None:
        """Before the module runs."""
        for owner, leaf, parameter, stored in self._placeholders:
            tensor = self._checkpoint.tensor(stored, tuple(parameter.shape)).float()
            setattr(owner, leaf, nn.Parameter(tensor, requires_grad=False))

    def drop(self, *_: object) -> None:
        """After the module ran."""
        for owner, leaf, parameter, _name in self._placeholders:
            setattr(owner, leaf, parameter)

    def _stored_name(self, module: str, leaf: str) -> str:
        path = module.replace(_BASE_LAYER, "")
        if path == HEAD_PATH and self._tied:
            path = EMBEDDING_PATH
        return f"{path}.{leaf}"
