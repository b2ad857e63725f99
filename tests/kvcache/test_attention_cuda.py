"""The CUDA attention kernels, run from their own text, against float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from polyloom.kvcache.kernels import cuda_attention
from tests.cuda_emulator.attention_cases import AttentionCase, AttentionShape
from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.lora_cases import relative

BARS = {torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 1e-2}
SHAPES = [
    AttentionShape(2, 1, 64, rotary=64),
    AttentionShape(1, 7, 32, block_size=8, rotary=16),
    AttentionShape(2, 4, 128, rotary=128),
    AttentionShape(1, 9, 80, block_size=32),
    AttentionShape(1, 2, 256, rotary=256),
    AttentionShape(3, 3, 16, block_size=5, rotary=16),
]


@pytest.mark.parametrize("dtype", BARS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decodes_and_verifications(
    emulated_device: EmulatedDevice, shape: AttentionShape, dtype: torch.dtype
) -> None:
    """One token of context, block edges, several queries, all at once; then a window and a cap."""
    case = AttentionCase(shape, [1, 16, 33, 70, 8], [1, 1, 3, 8, 8], dtype)
    expected = case.expected()
    assert relative(case.run(), expected) <= BARS[dtype]
    case = AttentionCase(shape, [40, 9, 100], [5, 1, 2], dtype, seed=1)
    options = {"window": 11, "softcap": 3.0, "scale": 0.5}
    expected = case.expected(**options)
    assert relative(case.run(**options), expected) <= BARS[dtype]


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(emulated_device: EmulatedDevice, seed: int) -> None:
    """Decodes, verifications and prefill chunks side by side."""
    rng = np.random.default_rng(seed)
    dtype = list(BARS)[seed % 3]
    shape = AttentionShape(
        int(rng.integers(1, 4)),
        int(rng.integers(1, 10)),
        int(rng.choice([16, 48, 64, 96])),
        int(rng.choice([4, 16])),
    )
    counts = [int(n) for n in rng.choice([1, 1, 1, 2, 8, 9, 30], int(rng.integers(1, 6)))]
    contexts = [count + int(rng.integers(0, 60)) for count in counts]
    case = AttentionCase(shape, contexts, counts, dtype, seed=seed)
    options = {
        "window": [None, 1, 13][seed % 3 if seed % 2 else 0],
        "softcap": 20.0 if seed % 4 == 3 else None,
    }
    expected = case.expected(**options)
    assert relative(case.run(**options), expected) <= BARS[dtype]


@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_contexts_are_joined(
    emulated_device: EmulatedDevice, splits: int, dtype: torch.dtype
) -> None:
    """Also where some parts are empty, and where a window leaves most of them so."""
    case = AttentionCase(AttentionShape(2, 4, 64), [130, 1, 300], [1, 1, 4], dtype)
    for window in (None, 40):
        expected = case.expected(window=window)
        plan = replace(case.plan(), splits=splits)
        assert relative(case.run(window=window, plan=plan), expected) <= BARS[dtype]


def test_few_long_contexts_are_split(emulated_device: EmulatedDevice) -> None:
    one = AttentionCase(AttentionShape(1, 2, 16), [1500], [1], torch.float32)
    assert one.plan().splits == 1500 // 256
    expected = one.expected()
    assert relative(one.run(), expected) <= 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits(emulated_device: EmulatedDevice, dtype: torch.dtype) -> None:
    """Exact for what is stored; a prefill reads the same values."""
    shape = AttentionShape(2, 3, 64, rotary=64)
    case = AttentionCase(shape, [37, 12, 50], [1, 4, 20], dtype, eight_bits=True)
    expected = case.expected()
    # New tokens are rounded to 8 bits from fp32, so a few land on the other side of a half.
    assert relative(case.run(), expected) <= (1e-4 if dtype is torch.float32 else 1e-2)


def test_appended_values_are_bit_for_bit(emulated_device: EmulatedDevice) -> None:
    case = AttentionCase(AttentionShape(2, 2, 32), [20, 3], [4, 3], torch.bfloat16)
    before = case.keys.clone()
    plan = case.plan()
    cuda_attention.append(case.q, case.k, case.v, case.keys, case.values, None, plan.slots, None)
    blocks, places = plan.slots // 16, plan.slots % 16
    assert torch.equal(case.keys[blocks, :, places], case.k)
    assert torch.equal(case.values[blocks, :, places], case.v)
    case.keys[blocks, :, places] = before[blocks, :, places]
    assert torch.equal(case.keys.view(torch.int16), before.view(torch.int16))


def test_padding_is_left_alone(emulated_device: EmulatedDevice) -> None:
    """A graph's batch is filled up with tokens of slot -1 and sequences without queries."""
    case = AttentionCase(AttentionShape(1, 2, 32), [20, 30], [1, 1], torch.float32)
    plan = case.plan()
    sequences = plan.sequences.clone()
    sequences[1, 1] = 0
    slots = plan.slots.clone()
    slots[1] = -1
    q = case.q.clone()
    expected = case.expected()
    out = case.run(plan=replace(plan, sequences=sequences, slots=slots))
    assert relative(out[:1], expected[:1]) <= 2e-6
    assert torch.equal(case.q[1], q[1])


def test_gather_and_copy(emulated_device: EmulatedDevice) -> None:
    case = AttentionCase(AttentionShape(2, 1, 16), [37], [1], torch.bfloat16)
    case.run()
    k, v = cuda_attention.gather(case.keys, case.values, None, case.tables[0], 37, torch.bfloat16)
    assert torch.equal(k.double(), case._context(case.keys, 0, 0, 37).transpose(0, 1))
    assert torch.equal(v.double(), case._context(case.values, 1, 0, 37).transpose(0, 1))
    keys, values = torch.randn(2, 3, 9, 2, 16, 16).to(torch.bfloat16)
    expected = keys.clone(), values.clone()
    for part in expected:
        part[:, 5], part[:, 0] = part[:, 2], part[:, 8]
    cuda_attention.copy_blocks(keys, values, [(2, 5), (8, 0)])
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])


def test_a_context_is_read_once_for_all_its_query_heads(emulated_device: EmulatedDevice) -> None:
    case = AttentionCase(AttentionShape(2, 4, 128), [512, 512], [1, 1], torch.bfloat16)
    plan = replace(case.plan(), splits=1)
    emulated_device.traffic()
    case.run(plan=plan)
    context = 2 * 2 * 2 * 512 * 128 * 2  # sequences, K and V, heads, tokens, dims, bytes
    assert context <= emulated_device.traffic().loaded <= 1.1 * context
