"""Faults planted in the kernels' text, each of which the emulator or the reference must catch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from polyloom.adapters.kernels.cuda import CudaLoraOp
from polyloom.kvcache.kernels.cuda import stand_in
from polyloom.platform.engine.kernels.cuda_sampling import UNREAD, sample_rows
from polyloom.routing.sampling_params import SamplingParams
from tests.cuda_emulator.attention_cases import AttentionCase, AttentionShape
from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.emulator import UNDEFINED_BEHAVIOUR, KernelError, RawModule
from tests.cuda_emulator.lora_cases import LoraCase, LoraShape, relative
from tests.cuda_emulator.sampling_cases import VOCABULARY, Asked, check, random_row

BAR = 2e-6
ROUNDED = 1e-4  # of new tokens some land on the other side of a half


class WrongResultError(AssertionError):
    """A kernel's result is not the reference's."""


@dataclass(frozen=True)
class Mutation:
    """`old` becomes `new` in the kernels that `run` exercises."""

    name: str
    run: Callable[[], None]
    old: str
    new: str


class MutatedDevice(EmulatedDevice):
    """Runs one planted fault. Few instantiations, so that it compiles quickly."""

    def __init__(self, mutation: Mutation, checks: Sequence[str] = UNDEFINED_BEHAVIOUR) -> None:
        super().__init__(checks)
        self._mutation = mutation

    def module(self, code: str, names: Sequence[str]) -> RawModule:
        if self._mutation.old not in code:
            raise ValueError(f"{self._mutation.name}: its text is not in the source")
        mutated = code.replace(self._mutation.old, self._mutation.new, 1)
        few = [name for name in names if name not in _UNUSED]
        return super().module(mutated, few)


_UNUSED = {f"attend<float,float,{rows},1>" for rows in (8, 16)} | {"kv_gather<float,float>"}


def run_lora() -> None:
    """Two splits of the input, three ranks, a second tile, row vectors, the base between."""
    case = LoraCase(
        CudaLoraOp(torch.float32),
        LoraShape(600, (40, 24)),
        [20, 3, 8],
        torch.float32,
        with_rows=True,
    )
    _within(case.error([(0, 1), (None, 2), (1, 3), (0, 17), (2, 1)]))


def run_attention() -> None:
    """A window and split contexts; two queries and two heads make four rows."""
    case = AttentionCase(
        AttentionShape(2, 2, 64, rotary=32), [1, 40, 150], [1, 2, 2], torch.float32
    )
    plan = replace(case.plan(), splits=3)
    expected = case.expected(window=70)
    _within(relative(case.run(window=70, plan=plan), expected))
    case = AttentionCase(AttentionShape(1, 4, 128), [100, 33], [1, 1], torch.float32)
    expected = case.expected()
    _within(relative(case.run(), expected))


def run_eight_bits() -> None:
    """A cache of 8 bits: new tokens are rounded, old ones read with their scales."""
    shape = AttentionShape(2, 2, 64, rotary=64)
    case = AttentionCase(shape, [50, 9], [1, 2], torch.float32, eight_bits=True)
    expected = case.expected()
    _within(relative(case.run(), expected), ROUNDED)


def run_sampling() -> None:
    """Random parameters, ties that top-p cuts through, and rows that are left alone."""
    rng = np.random.default_rng(2)
    logits = (rng.normal(size=(24, VOCABULARY)) * rng.choice([0.1, 2, 8], (24, 1))).astype(
        np.float32
    )
    check(logits, [random_row(rng) for _ in logits])
    params = [SamplingParams(max_tokens=1, seed=n, top_p=0.4) for n in range(8)]
    ties = rng.integers(0, 3, (8, VOCABULARY)).astype(np.float32)
    check(ties, [Asked(param, [1], 1) for param in params])
    left = torch.from_numpy(ties.copy())
    if sample_rows(left, [UNREAD] * 8).tolist() != [-1] * 8:
        raise WrongResultError("a row that is not to be read has a token")


MUTATIONS = (
    Mutation(
        "shrink: no barrier after the input is staged", run_lora,
        "  __syncthreads();\n  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;",
        "  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;",
    ),
    Mutation(
        "both: the page after the last one", run_lora,
        "pages + (long long)tile.z * width + p)", "pages + (long long)tile.z * width + p + 1)",
    ),
    Mutation("shrink: the tail is missing", run_lora, "k < span; k += 32 * N", "k + 32 * N <= span; k += 32 * N"),
    Mutation("shrink: the sum misses lanes", run_lora, "int step = 4; step > 0", "int step = 2; step > 0"),
    Mutation("expand: the last split is missing", run_lora, "z < splits; z++)\n        sum", "z + 1 < splits; z++)\n        sum"),
    Mutation("expand: gain for shift", run_lora, "__ldg(rows + outs + o)", "__ldg(rows + o)"),
    Mutation("expand: outputs are not cut", run_lora, "min(outs, o0 + outs_a_block)", "o0 + outs_a_block"),
    Mutation(
        "expand: two barriers, by branch", run_lora,
        "  __syncthreads();\n  const float* vectors", "  if (threadIdx.x & 1)\n    __syncthreads();\n  else\n    __syncthreads();\n  const float* vectors",
    ),
    Mutation("both: the last token's index is not loaded", run_lora, "threadIdx.x < tile.y) token_of", "threadIdx.x + 1 < tile.y) token_of"),
    Mutation(
        "attend: no barrier before weights are read", run_attention,
        "    __syncthreads();\n#pragma unroll\n    for (int r = 0; r < ROWS; r++) {\n#pragma unroll\n      for (int c = 0; c < COLS; c++) acc",
        "#pragma unroll\n    for (int r = 0; r < ROWS; r++) {\n#pragma unroll\n      for (int c = 0; c < COLS; c++) acc",
    ),
    Mutation(
        "attend: no barrier after a round", run_attention,
        "    __syncthreads();\n  }\n\n  for (int other", "  }\n\n  for (int other",
    ),
    Mutation("attend: a token does not see itself", run_attention, "position <= query &&", "position < query &&"),
    Mutation("attend: a window of one more", run_attention, "position > query - window", "position >= query - window"),
    Mutation("attend: the next block too early", run_attention, "max_blocks + position / block_size", "max_blocks + (position + 1) / block_size"),
    Mutation("attend: old sums keep their scale", run_attention, "acc[c][r] *= fixes[r]", "acc[c][r] *= 1.f"),
    Mutation("attend: a shuffle that some lanes miss", run_attention, "score += __shfl_xor_sync(FULL_WARP, score, 2);", "if (part < 3) score += __shfl_xor_sync(FULL_WARP, score, 2);"),
    Mutation("attend: keys of 8 bits without their scale", run_eight_bits, "dot[r] *= key_scale", "dot[r] *= 1.f"),
    Mutation("append: a wrong scale", run_eight_bits, "largest / 127.f)", "largest / 128.f)"),
    Mutation("append: turned the wrong way", run_attention, "d < half ? -row", "d < half ? row"),
    Mutation("merge: weights keep their scale", run_attention, "sum += __ldg(split + dim + 1) * fix", "sum += __ldg(split + dim + 1)"),
    Mutation(
        "sample: a search begins before the last one is read", run_sampling,
        "  __syncthreads();  // the last search's result may still be read\n", "",
    ),
    Mutation("sample: every row is read", run_sampling, "row.mode == UNREAD", "row.mode > UNREAD"),
    Mutation("sample: all ties are kept", run_sampling, "(bits == cut.bits && token <= cut.last_token)", "bits == cut.bits"),
    Mutation("sample: other noise", run_sampling, "0x31848BABu", "0x31848BADu"),
    Mutation("sample: a penalty is not applied", run_sampling, "if (edit.count > 0)", "if (edit.count > 1)"),
)  # fmt: skip


def caught(mutation: Mutation) -> str | None:
    """How the fault shows, in one line; None if it does not."""
    with stand_in("cpu", MutatedDevice(mutation)):
        try:
            mutation.run()
        except KernelError as error:
            return str(error)
        except WrongResultError as error:
            return str(error)
        except AssertionError:
            return "wrong result"
    return None


def _within(error: float, bar: float = BAR) -> None:
    if not error <= bar:
        raise WrongResultError(f"relative error {error:.1e}")
