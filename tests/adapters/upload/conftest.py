"""Real PEFT adapters of tiny random models, and the layout and weights of those models."""

import io
import tarfile
import warnings
import zipfile
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from polyloom.adapters.base_layout import (
    BaseLayout,
    CheckpointModule,
    GroupShape,
    ModuleGroup,
    ModuleSlice,
)

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.1,
}
MEMBERS = {
    ModuleGroup.QKV: ("q_proj", "k_proj", "v_proj"),
    ModuleGroup.OUT: ("o_proj",),
    ModuleGroup.GATE_UP: ("gate_proj", "up_proj"),
    ModuleGroup.DOWN: ("down_proj",),
    ModuleGroup.HEAD: ("lm_head",),
}
FUSED = {ModuleGroup.QKV: "qkv_proj", ModuleGroup.GATE_UP: "gate_up_proj"}


def llama(**options: object) -> PreTrainedModel:
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})).eval()


def qwen2(**options: object) -> PreTrainedModel:
    torch.manual_seed(4)
    model = Qwen2ForCausalLM(Qwen2Config(**{**SIZES, **options})).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    return model


def phi3(**options: object) -> PreTrainedModel:
    torch.manual_seed(5)
    return Phi3ForCausalLM(Phi3Config(**{**SIZES, **options})).eval()


@dataclass(frozen=True)
class Base:
    """A tiny model, how adapters see it, and its weights (`adapters.weights.BaseWeights`)."""

    model: PreTrainedModel
    layout: BaseLayout

    def module(self, entry: CheckpointModule, layer: int) -> nn.Linear:
        path = entry.path
        if entry.group is not ModuleGroup.HEAD:
            path = f"model.layers.{layer}.{path}"
        module = self.model.get_submodule(path)
        return module.base_layer if hasattr(module, "base_layer") else module

    def rows(self, group: ModuleGroup, layer: int, offset: int, out_features: int) -> torch.Tensor:
        parts = [
            self.module(m, layer).weight.detach() for m in self.layout.modules if m.group is group
        ]
        return torch.cat(parts)[offset : offset + out_features].float()


def base_of(model: PreTrainedModel, name: str = "tiny") -> Base:
    """Read the layout off the model's own modules."""
    config = model.config
    paths = {n.removeprefix("model.layers.0."): m for n, m in model.named_modules()}
    groups, modules = [], []
    for group, members in MEMBERS.items():
        parent = {"qkv": "self_attn.", "out": "self_attn.", "head": ""}.get(group, "mlp.")
        fused = FUSED.get(group, "")
        present = (fused,) if parent + fused in paths and fused else members
        offset = 0
        for member in present:
            linear = paths[parent + member]
            modules.append(
                CheckpointModule(
                    path=parent + member,
                    group=group,
                    offset=offset,
                    out_features=linear.out_features,
                    in_features=linear.in_features,
                    has_bias=linear.bias is not None,
                )
            )
            offset += linear.out_features
        slices = tuple(
            ModuleSlice(m.path, m.offset, m.out_features) for m in modules[-len(present) :]
        )
        layers = 1 if group is ModuleGroup.HEAD else config.num_hidden_layers
        groups.append(GroupShape(group, layers, modules[-1].in_features, slices))
    layout = BaseLayout(
        name=name,
        digest="sha256:00",
        architecture=type(model).__name__,
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        tied_head=config.tie_word_embeddings,
        layer_prefix="model.layers",
        groups=tuple(groups),
        modules=tuple(modules),
    )
    return Base(model, layout)


@pytest.fixture
def base() -> Base:
    """A tiny untied Llama of its own for each test, since PEFT changes models in place."""
    return base_of(llama())


@pytest.fixture
def make_base() -> Callable[..., Base]:
    """`make_base("llama" | "qwen2" | "phi3", **config)`."""
    families = {"llama": llama, "qwen2": qwen2, "phi3": phi3}
    return lambda family, **options: base_of(families[family](**options))


@dataclass(frozen=True)
class Trained:
    """An adapter as a trainer left it: PEFT's model, and the folder that it saved."""

    peft: PeftModel
    folder: Path

    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "adapter_model.safetensors")

    def rewrite(self, tensors: dict[str, torch.Tensor]) -> None:
        contiguous = {name: t.contiguous() for name, t in tensors.items()}
        save_file(contiguous, self.folder / "adapter_model.safetensors")

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.peft(tokens).logits


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Trained]:
    """`train(base, **lora_config)`: every LoRA parameter random, saved by PEFT itself."""

    def make(base: Base, folder: str = "adapter", **config: object) -> Trained:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft = get_peft_model(base.model, LoraConfig(**{"task_type": "CAUSAL_LM", **config}))
            generator = torch.Generator().manual_seed(11)
            for name, parameter in peft.named_parameters():
                if "magnitude" in name:
                    scale = 1 + 0.3 * torch.randn(parameter.shape, generator=generator)
                    parameter.data *= scale
                elif "lora_" in name:
                    parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
            peft.eval().save_pretrained(str(tmp_path / folder))
        return Trained(peft, tmp_path / folder)

    return make


def chunked(data: bytes, size: int = 7_001) -> AsyncIterator[bytes]:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), size):
            yield data[start : start + size]

    return chunks()


@pytest.fixture
def stream() -> Callable[[bytes], AsyncIterator[bytes]]:
    """A body as it arrives: in chunks."""
    return chunked


Files = Iterable[tuple[str, bytes]]


@pytest.fixture
def make_tar() -> Callable[..., bytes]:
    """`make_tar([(name, bytes)], mode="w" | "w:gz")`."""

    def make(files: Files, mode: str = "w") -> bytes:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode=mode) as tar:
            for name, data in files:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return out.getvalue()

    return make


@pytest.fixture
def make_zip() -> Callable[..., bytes]:
    """`make_zip([(name, bytes)])`, deflated."""

    def make(files: Files) -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in files:
                archive.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
        return out.getvalue()

    return make
