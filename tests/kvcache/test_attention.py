"""Paged attention: the plain one against dense torch, the C++ one against the plain one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from polyloom.kvcache.attention import OP_NAME, PagedAttention
from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.config import KVCacheConfig
from polyloom.kvcache.kernels.dispatch import Capabilities, OpLedger
from polyloom.kvcache.storage import KVStorage

Contexts = Callable[..., Any]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def poisoned(config: KVCacheConfig) -> KVStorage:
    """A cache whose unwritten slots would show if they were ever used."""
    storage = KVStorage(config)
    storage.keys.fill_(float("nan"))
    storage.values.fill_(float("nan"))
    return storage


def attention(
    config: KVCacheConfig, num_heads: int, implementation: Any
) -> tuple[PagedAttention, OpLedger]:
    capabilities = Capabilities()
    op = PagedAttention(config, poisoned(config), num_heads, implementation, capabilities)
    (ledger,) = capabilities.ledgers()
    assert ledger.name == OP_NAME
    return op, ledger


def packed_qkv(
    config: KVCacheConfig, num_heads: int, tokens: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as strided views of one tensor, as the decoder has them."""
    heads, dim = config.num_kv_heads, config.head_dim
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randn(tokens, (num_heads + 2 * heads) * dim, generator=generator)
    q, k, v = packed.to(config.dtype).split([num_heads * dim, heads * dim, heads * dim], dim=-1)
    return (
        q.unflatten(1, (num_heads, dim)),
        k.unflatten(1, (heads, dim)),
        v.unflatten(1, (heads, dim)),
    )


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """torch's own attention over one whole sequence, [T, H * D]."""
    count = q.shape[0]
    seen = torch.ones(count, count, dtype=torch.bool).tril()
    if window is not None:
        seen &= torch.ones(count, count, dtype=torch.bool).triu(1 - window)
    attended = F.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1),
        attn_mask=seen, scale=scale, enable_gqa=True,
    )  # fmt: skip
    return attended.transpose(0, 1).flatten(1)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize("window", [None, 1, 7, 40])
def test_chunks_give_what_dense_attention_gives(
    paged_contexts: Contexts, implementation: str, window: int | None
) -> None:
    contexts = paged_contexts(2, 90)
    op, ledger = attention(contexts.config, 6, implementation)
    whole = [packed_qkv(contexts.config, 6, 90, seed) for seed in (1, 2)]
    parts: list[list[torch.Tensor]] = [[], []]
    chunks = [(33, 1), (1, 50), (16, 15), (40, 24)]
    for step in chunks:
        batch = contexts.step(step)
        own = [slice(n - count, n) for n, count in zip(contexts.lengths, step, strict=True)]
        q, k, v = (torch.cat([whole[i][part][own[i]] for i in (0, 1)]) for part in range(3))
        out = op(0, q, k, v, batch, scale=0.2, window=window, softcap=None)
        for i, part in enumerate(out.split(list(step))):
            parts[i].append(part)
    for i in (0, 1):
        expected = dense(*whole[i], scale=0.2, window=window)
        torch.testing.assert_close(torch.cat(parts[i]), expected, rtol=1e-5, atol=1e-5)
    assert (ledger.engaged, dict(ledger.fallbacks)) == (len(chunks), {})


@settings(max_examples=30)
@given(
    data=st.data(),
    sequences=st.integers(1, 5),
    heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.sampled_from([16, 32, 48, 64, 80, 128, 256]),
    block_size=st.sampled_from([16, 32, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.floats(0.5, 50.0),
    scale=st.floats(0.02, 0.5),
    seed=st.integers(0, 2**20),
)
def test_cpu_equals_reference_over_ragged_mixes(
    paged_contexts: Contexts,
    data: st.DataObject,
    sequences: int,
    heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    scale: float,
    seed: int,
) -> None:
    """Prefill of any length, then decodes, drafts and chunks side by side."""
    prefill = st.lists(st.integers(1, 300), min_size=sequences, max_size=sequences)
    ragged = st.lists(
        st.integers(1, 9) | st.integers(10, 70), min_size=sequences, max_size=sequences
    )
    steps = [data.draw(prefill), data.draw(ragged), data.draw(ragged)]
    contexts = paged_contexts(
        sequences, 600, heads=heads, head_dim=head_dim, block_size=block_size, dtype=dtype,
        seed=seed,
    )  # fmt: skip
    num_heads = heads * group
    ops = [attention(contexts.config, num_heads, name)[0] for name in ("reference", "cpu")]
    for index, step in enumerate(steps):
        batch = contexts.step(step)
        q, k, v = packed_qkv(contexts.config, num_heads, sum(step), seed + index)
        expected, actual = (
            op(0, q, k, v, batch, scale=scale, window=window, softcap=softcap) for op in ops
        )
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_single_context_is_split_and_joined(
    paged_contexts: Contexts, dtype: torch.dtype
) -> None:
    contexts = paged_contexts(1, 3000, heads=1, dtype=dtype)
    plain, _ = attention(contexts.config, 3, "reference")
    fast, _ = attention(contexts.config, 3, "cpu")
    for index, step in enumerate([[2999], [1]]):
        batch = contexts.step(step)
        q, k, v = packed_qkv(contexts.config, 3, step[0], index)
        expected, actual = (
            op(0, q, k, v, batch, scale=1.0, window=None, softcap=None) for op in (plain, fast)
        )
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_layers_have_their_own_cache(paged_contexts: Contexts, implementation: str) -> None:
    contexts = paged_contexts(1, 40, layers=2)
    op, _ = attention(contexts.config, 2, implementation)
    batch = contexts.step([20])
    inputs = [packed_qkv(contexts.config, 2, 20, seed) for seed in (1, 2)]
    for layer in (0, 1):
        op(layer, *inputs[layer], batch, scale=1.0, window=None, softcap=None)
    last = contexts.step([1])
    token = packed_qkv(contexts.config, 2, 1, 3)
    for layer in (0, 1):
        whole = tuple(torch.cat(pair) for pair in zip(inputs[layer], token, strict=True))
        expected = dense(*whole, scale=1.0, window=None)[-1:]
        actual = op(layer, *token, last, scale=1.0, window=None, softcap=None)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_sequence_of_nan_leaves_the_others_alone(
    paged_contexts: Contexts, dtype: torch.dtype
) -> None:
    """A broken adapter's K and V lie in its own blocks, and may have lain in another's before."""
    contexts = paged_contexts(3, 60, dtype=dtype)
    clean, _ = attention(contexts.config, 6, "cpu")
    dirty, _ = attention(contexts.config, 6, "cpu")
    for index, step in enumerate([[37, 5, 21], [1, 1, 3]]):
        batch = contexts.step(step)
        q, k, v = packed_qkv(contexts.config, 6, sum(step), index)
        expected = clean(0, q, k, v, batch, scale=1.0, window=None, softcap=None)
        broken = slice(step[0], step[0] + step[1])
        for part in (q, k, v):
            part[broken] = float("nan")
        actual = dirty(0, q, k, v, batch, scale=1.0, window=None, softcap=None)
        assert actual[broken].isnan().all()
        for own in (slice(0, step[0]), slice(step[0] + step[1], None)):
            assert torch.equal(actual[own], expected[own])


def test_repeats_are_equal(paged_contexts: Contexts) -> None:
    contexts = paged_contexts(2, 800, dtype=torch.bfloat16)
    op, _ = attention(contexts.config, 6, "cpu")
    batch = contexts.step([700, 130])
    q, k, v = packed_qkv(contexts.config, 6, 830, 0)
    outs = [op(0, q, k, v, batch, scale=1.0, window=None, softcap=None) for _ in range(4)]
    assert all(torch.equal(outs[0], out) for out in outs)


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"head_dim": 24}, "head_dim 24 is not a multiple of 16 up to 256"),
        ({"block_size": 8}, "block_size 8 is not a multiple of 16"),
        ({"dtype": torch.float16}, "cache dtype torch.float16"),
    ],
)
def test_uncovered_shapes_fall_back_and_are_counted(
    paged_contexts: Contexts, shape: dict[str, Any], reason: str
) -> None:
    contexts = paged_contexts(1, 30, **shape)
    op, ledger = attention(contexts.config, 4, "cpu")
    plain, _ = attention(contexts.config, 4, "reference")
    batch = contexts.step([17])
    q, k, v = packed_qkv(contexts.config, 4, 17, 0)
    actual, expected = (
        o(0, q, k, v, batch, scale=1.0, window=None, softcap=None) for o in (op, plain)
    )
    assert torch.equal(actual, expected)
    assert (ledger.engaged, dict(ledger.fallbacks)) == (0, {reason: 1})


def test_query_heads_must_divide_into_kv_heads(paged_contexts: Contexts) -> None:
    with pytest.raises(ValueError, match="num_heads 5 is not a multiple of num_kv_heads 2"):
        attention(paged_contexts(1, 16).config, 5, "cpu")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_tables", -1, r"block_tables\[0, 0\] is -1"),
        ("block_tables", 10**6, r"block_tables\[0, 0\] is 1000000"),
        ("context_lens", 1, r"context_lens\[0\] is less than its tokens"),
        ("context_lens", 10**6, r"context_lens\[0\] exceeds its block table"),
        ("slot_mapping", -1, r"slot_mapping\[0\] is -1"),
        ("slot_mapping", 10**6, r"slot_mapping\[0\] is 1000000"),
        ("query_starts", 3, "query_starts does not cover"),
    ],
)
def test_a_batch_that_points_outside_the_cache_is_refused(
    paged_contexts: Contexts, field: str, value: int, message: str
) -> None:
    contexts = paged_contexts(1, 40)
    op, _ = attention(contexts.config, 4, "cpu")
    batch: AttentionBatch = contexts.step([20])
    getattr(batch, field).view(-1)[0] = value
    with pytest.raises(RuntimeError, match=message):
        op(
            0,
            *packed_qkv(contexts.config, 4, 20, 0),
            batch,
            scale=1.0,
            window=None,
            softcap=None,
        )


def test_another_dtype_than_the_caches_is_refused(paged_contexts: Contexts) -> None:
    contexts = paged_contexts(1, 40, dtype=torch.bfloat16)
    op, _ = attention(contexts.config, 4, "cpu")
    batch = contexts.step([20])
    q, k, v = (part.float() for part in packed_qkv(contexts.config, 4, 20, 0))
    with pytest.raises(RuntimeError, match="q has dtype Float, not BFloat16"):
        op(0, q, k, v, batch, scale=1.0, window=None, softcap=None)
