"""The C++ LoRA op as it is compiled for processors unlike this one, run on this one."""

import multiprocessing
import os

import pytest
import torch

from polyloom.adapters.base_layout import BaseLayout, ModuleGroup
from polyloom.adapters.config import AdapterPoolConfig
from polyloom.adapters.kernels.contract import LoraOp
from polyloom.adapters.kernels.cpu import CpuLoraOp, load_cpu_lora
from polyloom.adapters.kernels.reference import ReferenceLoraOp
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.segments import lora_batch
from polyloom.adapters.weights import AdapterWeights, LoraTerm, RowTerm
from polyloom.kvcache.kernels import build

X86 = os.uname().machine == "x86_64"
PORTABLE = ("-march=x86-64-v3",) if X86 else ("-O1",)
NO_TILES = ("-mno-amx-bf16",) if X86 else ("-O2",)


def applied(op: LoraOp, layout: BaseLayout, dtype: torch.dtype) -> torch.Tensor:
    """y of a fixed mix: short and long segments, the base, row vectors, ranks 12 and 40."""
    random = torch.Generator().manual_seed(0)
    config = AdapterPoolConfig(4 << 20, 2, 64, dtype, torch.device("cpu"))
    pages = AdapterPages(config, layout, op)
    allocations = []
    for rank in (12, 40):
        terms = tuple(
            LoraTerm(
                ModuleGroup.QKV,
                0,
                part.offset,
                torch.randn(rank, 72, generator=random) / 9,
                torch.randn(part.out_features, rank, generator=random) / rank,
            )
            for part in layout.group(ModuleGroup.QKV).slices
        )
        rows = (RowTerm(ModuleGroup.QKV, 0, 0, torch.full((80,), rank / 20), torch.ones(80)),)
        weights = AdapterWeights(f"sha256:{rank}", terms, rows if rank == 40 else ())
        allocation = pages.allocate(pages.need(weights))
        assert allocation is not None
        pages.write(allocation, weights)
        allocations.append(allocation)
    batch = lora_batch([(allocations[0], 1), (None, 2), (allocations[1], 35), (allocations[0], 7)])
    x = torch.randn(45, 72, generator=random).to(dtype)
    y = torch.randn(45, 144, generator=random).to(dtype)
    op.apply(pages.pools[ModuleGroup.QKV], 0, x, y, batch, torch.ones(144, dtype=dtype))
    return y.float()


def compiled_for(flags: tuple[str, ...], layout: BaseLayout) -> None:
    """In a process of its own, since an op can be registered once."""
    build.COMPILE_FLAGS = (*build.COMPILE_FLAGS, *flags)
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
        reason = load_cpu_lora(dtype)
        if reason is not None:
            raise SystemExit(reason)
        expected = applied(ReferenceLoraOp(), layout, dtype)
        found = (applied(CpuLoraOp(dtype), layout, dtype) - expected).abs().max().item()
        if not found <= bound:
            raise SystemExit(f"{dtype}: differs by {found}")


@pytest.mark.slow
@pytest.mark.parametrize("flags", [PORTABLE, NO_TILES], ids=["portable", "no-tiles"])
def test_the_op_compiles_and_agrees(flags: tuple[str, ...], layout: BaseLayout) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=compiled_for, args=(flags, layout)
    )
    process.start()
    process.join()
    assert process.exitcode == 0
