"""Which implementation of the LoRA gather op an engine runs: decided once, when it starts."""

from dataclasses import dataclass

import torch

from polyloom.adapters.kernels.contract import LoraOp
from polyloom.adapters.kernels.cpu import CpuLoraOp, load_cpu_lora
from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.adapters.kernels.cuda_launch import SOURCE, kernel_names
from polyloom.adapters.kernels.cuda_plan import MATMUL_TOKENS
from polyloom.adapters.kernels.reference import ReferenceLoraOp
from polyloom.kvcache.kernels.cuda import cuda_kernels, unavailable


@dataclass(frozen=True)
class LoraChoice:
    """fallback_reason: why it is `reference` although something faster was wanted, else None.

    why: this op.  kernels: compiled for it, in compile_seconds.  matrix: whose products on matrix
    units run long segments, and which those are; None if there are none.
    """

    op: LoraOp
    fallback_reason: str | None = None
    why: str = ""
    kernels: tuple[str, ...] = ()
    compile_seconds: float = 0.0
    matrix: tuple[str, str] | None = None


def choose_lora_op(dtype: torch.dtype, device: torch.device) -> LoraChoice:
    """The fastest implementation for `device` that can be built here."""
    if device.type != "cpu":
        return choose_cuda_lora_op(dtype, device)
    reason = load_cpu_lora(dtype)
    if reason is not None:
        return LoraChoice(ReferenceLoraOp(), reason)
    return LoraChoice(
        CpuLoraOp(dtype),
        why="C++ for this processor",
        matrix=("cpu", "segments of 8 tokens and more, where there is AMX"),
    )


def choose_cuda_lora_op(dtype: torch.dtype, device: torch.device) -> LoraChoice:
    """The CUDA kernels, on whatever compiles them for `device`."""
    reason = unavailable(dtype, device.type)
    if reason is not None:
        return LoraChoice(ReferenceLoraOp(), reason)
    kernels = kernel_names(dtype)
    return LoraChoice(
        CudaLoraOp(dtype),
        why=f"segments of less than {MATMUL_TOKENS} tokens are bound by reading pages",
        kernels=kernels,
        compile_seconds=cuda_kernels(SOURCE, kernels, device.type).compile(device),
        matrix=("torch", f"segments of {MATMUL_TOKENS} tokens and more, on tensor cores"),
    )
