"""The C++ ops against the plain torch ones, in float32 and bfloat16."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.platform.engine.kernels.cpu import CpuOps
from polyloom.platform.engine.kernels.ops import OP_NAMES, EngineOps, ReferenceOps

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(scope="module")
def cpu() -> CpuOps:
    return CpuOps(Capabilities())


@pytest.fixture(scope="module")
def plain() -> ReferenceOps:
    return ReferenceOps(Capabilities())


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few roundings: bfloat16 keeps 8 bits, float32 24."""
    rounding = 2**-7 if actual.dtype is torch.bfloat16 else 2e-6
    torch.testing.assert_close(actual, expected, rtol=rounding, atol=rounding)


def test_every_op_compiles_and_engages() -> None:
    capabilities = Capabilities()
    ops = CpuOps(capabilities)
    x = random(3, 64, dtype=torch.bfloat16)
    packed = ops.pack_linear(random(32, 64, dtype=torch.bfloat16))
    ops.linear(x, packed)
    ops.embedding(torch.tensor([0, 31]), packed)
    ops.rms_norm(x, x[0], 1e-5)
    ops.add_rms_norm(x, x.clone(), x[0], 1e-5)
    ops.silu_mul(x)
    ops.gelu_tanh_mul(x)
    heads = random(3, 2, 32, dtype=torch.bfloat16)
    ops.rope_(heads, heads.clone(), x[:, :32].contiguous(), x[:, 32:].contiguous())
    ledgers = {ledger.name: ledger for ledger in capabilities.ledgers()}
    assert set(ledgers) == set(OP_NAMES)
    for ledger in ledgers.values():
        assert ledger.implementation == "cpu"
        assert (ledger.engaged, dict(ledger.fallbacks)) == (1, {}), ledger


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 100),
    out_features=st.integers(1, 130),
    steps=st.integers(1, 6),
    bias=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_linear_over_shapes(
    tokens: int, out_features: int, steps: int, bias: bool, seed: int
) -> None:
    ops = CpuOps(Capabilities())
    x = random(tokens, 32 * steps, dtype=torch.bfloat16, seed=seed)
    weight = random(out_features, 32 * steps, dtype=torch.bfloat16, seed=seed + 1)
    shift = random(out_features, dtype=torch.bfloat16, seed=seed + 2) if bias else None
    packed = ops.pack_linear(weight, shift)
    assert packed.plain_because is None
    exact = x.double() @ weight.double().T + (0 if shift is None else shift.double())
    assert_close(ops.linear(x, packed), exact.to(torch.bfloat16))


def test_linear_reads_a_strided_view_and_repeats_itself(cpu: CpuOps) -> None:
    wide = random(40, 256, dtype=torch.bfloat16)
    packed = cpu.pack_linear(random(48, 64, dtype=torch.bfloat16, seed=1))
    view = wide[:, 64:128]
    first = cpu.linear(view, packed)
    assert torch.equal(first, cpu.linear(view.contiguous(), packed))
    assert all(torch.equal(first, cpu.linear(view, packed)) for _ in range(5))


def test_linear_rows_are_independent(cpu: CpuOps) -> None:
    """A row of NaN, as a broken adapter could make, must not reach its neighbours."""
    x = random(20, 64, dtype=torch.bfloat16)
    packed = cpu.pack_linear(random(48, 64, dtype=torch.bfloat16, seed=1))
    clean = cpu.linear(x, packed)
    x[7] = float("nan")
    poisoned = cpu.linear(x, packed)
    assert poisoned[7].isnan().all()
    others = [i for i in range(20) if i != 7]
    assert torch.equal(poisoned[others], clean[others])


@pytest.mark.parametrize("vocab", [48, 33])
def test_embedding_returns_the_packed_rows_exactly(cpu: CpuOps, vocab: int) -> None:
    weight = random(vocab, 96, dtype=torch.bfloat16)
    packed = cpu.pack_linear(weight)
    ids = torch.tensor([vocab - 1, 0, 17, 17, 5])
    assert torch.equal(cpu.embedding(ids, packed), weight[ids])


@pytest.mark.parametrize("bad", [-1, 48])
def test_embedding_refuses_an_id_beyond_the_weight(cpu: CpuOps, bad: int) -> None:
    packed = cpu.pack_linear(random(48, 32, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=rf"ids\[1\] is {bad}, of 48"):
        cpu.embedding(torch.tensor([0, bad]), packed)


def test_linear_refuses_another_width(cpu: CpuOps) -> None:
    packed = cpu.pack_linear(random(48, 64, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"x must be bfloat16 \[T, 64\]"):
        cpu.linear(random(2, 96, dtype=torch.bfloat16), packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("shape", [(1, 576), (37, 64), (5, 9, 64)])
def test_rms_norm(
    cpu: CpuOps, plain: ReferenceOps, dtype: torch.dtype, plus_one: bool, shape: tuple[int, ...]
) -> None:
    x, weight = random(*shape, dtype=dtype) * 3, random(shape[-1], dtype=dtype, seed=1)
    actual = cpu.rms_norm(x, weight, 1e-5, plus_one=plus_one)
    assert_close(actual, plain.rms_norm(x, weight, 1e-5, plus_one=plus_one))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads_in_a_packed_tensor(
    cpu: CpuOps, plain: ReferenceOps, dtype: torch.dtype
) -> None:
    packed = random(7, 5 * 32, dtype=dtype)
    heads = packed[:, 32:128].view(7, 3, 32)
    weight = random(32, dtype=dtype, seed=1)
    assert_close(cpu.rms_norm(heads, weight, 1e-6), plain.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plus_one", [False, True])
def test_add_rms_norm_updates_the_residual(
    cpu: CpuOps, plain: ReferenceOps, dtype: torch.dtype, plus_one: bool
) -> None:
    x, weight = random(70, 576, dtype=dtype), random(576, dtype=dtype, seed=1)
    residual, expected_residual = (random(70, 576, dtype=dtype, seed=2) for _ in range(2))
    actual = cpu.add_rms_norm(x, residual, weight, 1e-5, plus_one=plus_one)
    expected = plain.add_rms_norm(x, expected_residual, weight, 1e-5, plus_one=plus_one)
    assert torch.equal(residual, expected_residual)
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations(cpu: CpuOps, plain: ReferenceOps, dtype: torch.dtype, name: str) -> None:
    gate_up = random(33, 2 * 160, dtype=dtype) * 6
    gate_up[0, :4] = torch.tensor([-200.0, -90.0, 90.0, 0.0])
    exact = getattr(plain, name)(gate_up.double())
    assert_close(getattr(cpu, name)(gate_up), exact.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (32, 16), (96, 72), (8, 8)])
def test_rope_turns_views_in_place(
    cpu: CpuOps, plain: ReferenceOps, dtype: torch.dtype, head_dim: int, rotary: int
) -> None:
    def rotated(ops: EngineOps) -> torch.Tensor:
        packed = random(21, 5 * head_dim, dtype=dtype)
        q, k = packed[:, : 3 * head_dim], packed[:, 3 * head_dim : 4 * head_dim]
        angles = torch.rand(21, rotary // 2, generator=torch.Generator().manual_seed(1)) * 6.28
        turns = torch.cat((angles, angles), -1)
        ops.rope_(
            q.view(21, 3, head_dim),
            k.view(21, 1, head_dim),
            turns.cos().to(dtype),
            turns.sin().to(dtype),
        )
        return packed

    assert not torch.equal(rotated(cpu), random(21, 5 * head_dim, dtype=dtype))
    difference = (rotated(cpu).float() - rotated(plain).float()).abs().max().item()
    assert difference <= (2**-5 if dtype is torch.bfloat16 else 1e-6)


def test_fallbacks_are_counted_by_reason_and_agree() -> None:
    capabilities = Capabilities()
    ops = CpuOps(capabilities)
    x, weight = random(3, 24, dtype=torch.bfloat16), random(5, 24, dtype=torch.bfloat16)
    packed = ops.pack_linear(weight)
    assert torch.equal(ops.linear(x, packed), torch.nn.functional.linear(x, weight))
    assert torch.equal(ops.embedding(torch.tensor([4]), packed), weight[4:])
    ops.rms_norm(x, x[0], 1e-5)
    ops.silu_mul(x.half())
    ledgers = {ledger.name: ledger for ledger in capabilities.ledgers()}
    assert ledgers["linear"].fallbacks == {"in_features 24 is not a multiple of 32": 1}
    assert ledgers["rms_norm"].fallbacks == {"width 24 is not a multiple of 16": 1}
    assert ledgers["silu_mul"].fallbacks == {"dtype torch.float16": 1}
    assert all(ledger.engaged == 0 for ledger in ledgers.values())


def test_without_a_compiler_everything_runs_on_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "polyloom.platform.engine.kernels.cpu.load_cpu_ops", lambda *_: "no C++ compiler found"
    )
    capabilities = Capabilities()
    ops = CpuOps(capabilities)
    x = random(3, 64, dtype=torch.bfloat16)
    packed = ops.pack_linear(random(32, 64, dtype=torch.bfloat16))
    assert torch.equal(ops.linear(x, packed), torch.nn.functional.linear(x, packed.data))
    ops.rms_norm(x, x[0], 1e-5)
    ledgers = {ledger.name: ledger for ledger in capabilities.ledgers()}
    assert ledgers["linear"].fallbacks == {"no C++ compiler found": 1}
    assert ledgers["rms_norm"].fallbacks == {"no C++ compiler found": 1}
