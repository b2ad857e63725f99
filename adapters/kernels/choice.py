"""Which implementation of the LoRA gather op an engine runs: decided once, when it starts."""

from dataclasses import dataclass
from pathlib import Path

import torch

from polyloom.adapters.kernels.contract import LoraOp
from polyloom.adapters.kernels.cpu import CpuLoraOp, load_cpu_lora
from polyloom.adapters.kernels.reference import ReferenceLoraOp


@dataclass(frozen=True)
class LoraChoice:
    """fallback_reason: why it is `reference` although something faster was wanted, else None."""

    op: LoraOp
    fallback_reason: str | None = None


def choose_lora_op(
    dtype: torch.dtype, device: torch.device, cache_dir: Path | None = None
) -> LoraChoice:
    """The fastest implementation for `device` that can be built here.

    cache_dir: where built ops are kept, as for `load_cpu_ops`.
    """
    if device.type != "cpu":
        return LoraChoice(ReferenceLoraOp(), f"no op for {device.type} devices")
    reason = load_cpu_lora(dtype, cache_dir)
    if reason is not None:
        return LoraChoice(ReferenceLoraOp(), reason)
    return LoraChoice(CpuLoraOp(dtype))
