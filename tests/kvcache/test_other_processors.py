"""The C++ ops as they are compiled for processors unlike this one, run on this one."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.kernels import build, cpu, reference
from polyloom.platform.engine.kernels.cpu import SOURCES as ENGINE_SOURCES

X86 = os.uname().machine == "x86_64"
PORTABLE = ("-march=x86-64-v3",) if X86 else ("-O1",)
NO_TILES = ("-mno-amx-bf16",) if X86 else ("-O2",)


def difference(dtype: torch.dtype, tokens: int) -> float:
    """Largest difference from the plain attention over a prefill of one sequence."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, 64, generator=generator).to(dtype) for heads in (6, 2, 2))
    blocks = -(-tokens // 16)
    batch = AttentionBatch(
        query_starts=torch.tensor([0, tokens], dtype=torch.int32),
        context_lens=torch.tensor([tokens], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(tokens),
        positions=torch.arange(tokens),
    )
    keys, values = (torch.zeros(blocks, 2, 16, 64, dtype=dtype) for _ in range(2))
    reference.append(keys, values, k, v, batch.slot_mapping)
    how = {"scale": 0.3, "window": 50, "softcap": 9.0}
    expected = reference.attend(q, keys, values, batch, **how)
    fresh = (torch.zeros_like(keys), torch.zeros_like(values))
    actual = cpu.paged_attention(q, k, v, *fresh, batch, **how)
    return (actual.float() - expected.float()).abs().max().item()


def compiled_for(flags: tuple[str, ...], cache: Path) -> None:
    """In a process of its own, since an op can be registered once."""
    build.COMPILE_FLAGS = (*build.COMPILE_FLAGS, *flags)
    for name, sources in (("attention", cpu.SOURCES), ("engine", ENGINE_SOURCES)):
        reason = build.load_cpu_ops(f"polyloom_{name}", sources, cache)
        if reason is not None:
            raise SystemExit(reason)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for tokens in (1, 90):
            found = difference(dtype, tokens)
            if not found <= bound:
                raise SystemExit(f"{dtype}, {tokens} tokens: differs by {found}")
    x, weight = torch.randn(7, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    ops = torch.ops.polyloom_engine
    product = ops.linear(x, ops.pack(weight), None, 40, 64)
    torch.testing.assert_close(product.float(), x.float() @ weight.float().T, rtol=2e-2, atol=2e-2)
    gated = ops.silu_mul(x)
    expected = torch.nn.functional.silu(x[:, :32].float()) * x[:, 32:].float()
    torch.testing.assert_close(gated.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [PORTABLE, NO_TILES], ids=["portable", "no-tiles"])
def test_ops_compile_and_agree(flags: tuple[str, ...], tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=compiled_for, args=(flags, tmp_path)
    )
    process.start()
    process.join()
    assert process.exitcode == 0
