"""What the decoder's CPU ops cost on SmolLM2-135M's shapes, against reading their bytes alone.

bf16, two threads, 30 layers: `python -m benchmarks.kernels_cpu`.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.bandwidth import read_bandwidth
from polyloom.kvcache.attention import PagedAttention
from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.config import KVCacheConfig
from polyloom.kvcache.kernels.dispatch import Capabilities
from polyloom.kvcache.storage import KVStorage
from polyloom.platform.engine.kernels.cpu import CpuOps

DTYPE = torch.bfloat16
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 30, 9, 3, 64, 576, 1536, 49152
LINEARS = (
    ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    (HIDDEN, HIDDEN),
    (2 * INNER, HIDDEN),
    (HIDDEN, INNER),
)
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Timing:
    """One case: the best of several rounds, and the bytes that it cannot avoid reading."""

    name: str
    seconds: float
    read_bytes: int

    def line(self, bandwidth: float) -> str:
        rate = self.read_bytes / self.seconds
        return (
            f"{self.name:<44} {self.seconds * 1e3:8.2f} ms  {rate / 1e9:6.1f} GB/s"
            f"  {rate / bandwidth:5.2f} of the read bandwidth"
        )


def best(run: Callable[[], object], rounds: int = 12) -> float:
    """Shortest of `rounds` runs, in seconds: what the code costs when the machine is its own."""
    run()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return min(taken)


def linears(ops: CpuOps, tokens: int) -> Timing:
    """The fused linears of all layers."""
    layers = [
        [ops.pack_linear(torch.randn(shape).to(DTYPE)) for shape in LINEARS] for _ in range(LAYERS)
    ]
    inputs = {width: torch.randn(tokens, width).to(DTYPE) for width in (HIDDEN, INNER)}
    packed = list(itertools.chain.from_iterable(layers))
    seconds = best(lambda: [ops.linear(inputs[p.in_features], p) for p in packed])
    return Timing(f"linears, {tokens} tokens", seconds, sum(p.data.nbytes for p in packed))


def head(ops: CpuOps, tokens: int) -> Timing:
    """The tied output head."""
    packed = ops.pack_linear(torch.randn(VOCAB, HIDDEN).to(DTYPE))
    x = torch.randn(tokens, HIDDEN).to(DTYPE)
    return Timing(f"head, {tokens} tokens", best(lambda: ops.linear(x, packed)), packed.data.nbytes)


def row_wise(ops: CpuOps, tokens: int) -> Timing:
    """Two norms, the rotary embedding and the gated activation of all layers."""
    x, residual = (torch.randn(tokens, HIDDEN).to(DTYPE) for _ in range(2))
    weight = torch.ones(HIDDEN, dtype=DTYPE)
    gate_up = torch.randn(tokens, 2 * INNER).to(DTYPE)
    q = torch.randn(tokens, HEADS, HEAD_DIM).to(DTYPE)
    k = torch.randn(tokens, KV_HEADS, HEAD_DIM).to(DTYPE)
    cos, sin = (torch.rand(tokens, HEAD_DIM).to(DTYPE) for _ in range(2))

    def layers() -> None:
        for _ in range(LAYERS):
            ops.add_rms_norm(x, residual, weight, 1e-5)
            ops.rope_(q, k, cos, sin)
            ops.add_rms_norm(x, residual, weight, 1e-5)
            ops.silu_mul(gate_up)

    tensors = (x, residual, x, residual, q, k, gate_up)
    return Timing(
        f"norms, rope, activation, {tokens} tokens",
        best(layers),
        LAYERS * sum(t.nbytes for t in tensors),
    )


def attention(sequences: int, context: int, tokens: int) -> Timing:
    """All layers' attention, each sequence's last `tokens` tokens being the step's."""
    blocks = -(-context // BLOCK_SIZE)
    config = KVCacheConfig(
        LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, sequences * blocks, DTYPE, torch.device("cpu")
    )
    storage = KVStorage(config)
    storage.keys.fill_(0.1)
    storage.values.fill_(0.1)
    op = PagedAttention(config, storage, HEADS, "cpu", Capabilities())
    tables = torch.randperm(sequences * blocks).to(torch.int32).view(sequences, blocks)
    positions = torch.arange(context - tokens, context)
    slots = tables[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    batch = AttentionBatch(
        query_starts=torch.arange(sequences + 1, dtype=torch.int32) * tokens,
        context_lens=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=slots.flatten(),
        positions=positions.repeat(sequences),
    )
    qkv = torch.randn(sequences * tokens, HEADS + 2 * KV_HEADS, HEAD_DIM).to(DTYPE)
    q, k, v = qkv.tensor_split((HEADS, HEADS + KV_HEADS), dim=1)

    def layers() -> None:
        for layer in range(LAYERS):
            op(layer, q, k, v, batch, scale=HEAD_DIM**-0.5, window=None, softcap=None)

    return Timing(
        f"attention, {sequences} x {tokens} tokens at {context}",
        best(layers),
        storage.keys.nbytes + storage.values.nbytes,
    )


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    ops = CpuOps(Capabilities())
    bandwidth = read_bandwidth()
    print(f"reading: {bandwidth / 1e9:.1f} GB/s")
    timings = itertools.chain(
        (linears(ops, tokens) for tokens in (1, 16, 512)),
        (head(ops, tokens) for tokens in (1, 16)),
        (row_wise(ops, tokens) for tokens in (1, 16)),
        (attention(*case) for case in ((1, 256, 1), (16, 256, 1), (16, 256, 4), (1, 2048, 512))),
    )
    for timing in timings:
        print(timing.line(bandwidth), flush=True)


if __name__ == "__main__":
    main()
