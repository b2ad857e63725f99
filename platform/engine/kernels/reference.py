"""The decoder's ops in plain torch: the contract that the C++ ops are held to."""

import torch
import torch.nn.functional as F


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False
) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps)` over the last dimension, in fp32, times the weight.

    With `plus_one` (Gemma) times `1 + weight` before rounding to x's dtype; without (Llama) times
    `weight` after it, as transformers does in each family.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if plus_one:
        return (normed * (1.0 + weight.float())).to(x.dtype)
    return weight * normed.to(x.dtype)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[T, 2F]` whose first half is the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` with the tanh approximation, of `[T, 2F]` whose first half is the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def rope_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first R dimensions of each head of x `[T, heads, head_dim]` in place.

    cos, sin: [T, R]; dimension i is paired with i + R/2 ("rotate half").
    """
    rotary = x[..., : cos.shape[-1]]
    first, second = rotary.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    rotary.copy_(rotary * cos[:, None] + rotated * sin[:, None])
