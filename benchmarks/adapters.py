"""Random PEFT adapters of a base, in the shapes that the benchmarks and the parity suite mix."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

THROUGHPUT_RANKS = (16,) * 12 + (8,) * 2 + (64,) * 2


@dataclass(frozen=True)
class AdapterShape:
    """What distinguishes one random adapter from another."""

    rank: int
    targets: tuple[str, ...] | str = LINEARS
    alpha: float = 16.0
    rslora: bool = False
    dora: bool = False
    lora_bias: bool = False
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    layers: tuple[int, ...] | None = None

    def config(self) -> LoraConfig:
        """As PEFT writes it; random B, so that the adapter has an effect."""
        return LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            target_modules=self.targets if isinstance(self.targets, str) else list(self.targets),
            use_rslora=self.rslora,
            use_dora=self.dora,
            lora_bias=self.lora_bias,
            rank_pattern=dict(self.rank_pattern),
            alpha_pattern=dict(self.alpha_pattern),
            layers_to_transform=None if self.layers is None else list(self.layers),
            task_type="CAUSAL_LM",
        )


MIXED_SHAPES = (
    AdapterShape(1),
    AdapterShape(2, ("q_proj", "v_proj")),
    AdapterShape(3, "all-linear", alpha=6),
    AdapterShape(4, ("q_proj", "k_proj", "v_proj", "o_proj"), rslora=True),
    AdapterShape(5, r".*\.(gate|up)_proj"),
    AdapterShape(8, LINEARS, rank_pattern={"q_proj": 12, "down_proj": 3}),
    AdapterShape(8, LINEARS, alpha_pattern={"v_proj": 40.0}),
    AdapterShape(8, ("down_proj",), alpha=4),
    AdapterShape(8, ("q_proj", "v_proj"), layers=(0,)),
    AdapterShape(12, LINEARS, dora=True),
    AdapterShape(16, ("q_proj", "o_proj"), dora=True, rslora=True),
    AdapterShape(16, LINEARS),
    AdapterShape(16, ("q_proj", "v_proj", "down_proj"), lora_bias=True),
    AdapterShape(20, (*LINEARS, "lm_head")),
    AdapterShape(32, LINEARS, rslora=True, rank_pattern={"v_proj": 64}),
    AdapterShape(64, LINEARS, alpha=32),
    AdapterShape(64, ("v_proj",), dora=True),
)


def randomise(model: torch.nn.Module, generator: torch.Generator, strength: float) -> None:
    """Give every LoRA tensor random values, B of `strength` relative to a unit-gain update."""
    for name, parameter in model.named_parameters():
        if "lora_A" in name:
            values = torch.randn(parameter.shape, generator=generator) / parameter.shape[1] ** 0.5
        elif "lora_B" in name:
            values = torch.randn(parameter.shape, generator=generator) * strength
            values = values / max(parameter.shape[-1], 1) ** 0.5
        elif "lora_magnitude_vector" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            values = parameter.data.float() * (1 + 0.1 * noise)
        else:
            continue
        parameter.data.copy_(values.to(parameter.dtype))


def make_adapters(
    base: Path,
    folder: Path,
    shapes: Sequence[AdapterShape],
    *,
    strength: float = 0.2,
    seed: int = 0,
) -> tuple[Path, ...]:
    """Save one random PEFT adapter a shape under `folder`; returns their folders in order."""
    made = []
    for index, shape in enumerate(shapes):
        target = folder / f"adapter-{index:02}"
        if not (target / "adapter_config.json").exists():
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            peft_model = get_peft_model(model, shape.config())
            randomise(peft_model, torch.Generator().manual_seed(seed + index), strength)
            peft_model.save_pretrained(target)
        made.append(target)
    return tuple(made)
