"""What adapters add to a step on this CPU, against the time that reading their pages alone takes.

Shapes of SmolLM2-135M, bf16, all seven linears: `python -m benchmarks.lora_cpu`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.adapters import THROUGHPUT_RANKS
from benchmarks.bandwidth import read_bandwidth
from polyloom.adapters.base_layout import BaseLayout, GroupShape, ModuleGroup, ModuleSlice
from polyloom.adapters.config import AdapterPoolConfig
from polyloom.adapters.kernels.choice import choose_lora_op
from polyloom.adapters.layers import LoraLayers
from polyloom.adapters.pages import AdapterPages
from polyloom.adapters.placement import Allocation
from polyloom.adapters.segments import LoraBatch, lora_batch
from polyloom.adapters.weights import AdapterWeights, LoraTerm
from polyloom.kvcache.kernels.dispatch import Capabilities

DTYPE = torch.bfloat16
LINEARS: dict[ModuleGroup, tuple[int, tuple[int, ...]]] = {
    ModuleGroup.QKV: (576, (576, 192, 192)),
    ModuleGroup.OUT: (576, (576,)),
    ModuleGroup.GATE_UP: (576, (1536, 1536)),
    ModuleGroup.DOWN: (1536, (576,)),
}


@dataclass(frozen=True)
class LoraTiming:
    """One case. `floor_ms`: the active bytes over the bandwidth measured in the same run."""

    name: str
    ms: float
    active_bytes: int
    floor_ms: float

    @property
    def multiple(self) -> float:
        return self.ms / self.floor_ms

    def line(self) -> str:
        gigabytes = self.active_bytes / self.ms / 1e6
        return (
            f"{self.name:<28} {self.ms:7.2f} ms  {self.active_bytes / 1e6:6.1f} MB"
            f"  {gigabytes:5.1f} GB/s  {self.multiple:5.2f} x floor"
        )


def smollm2_layout() -> BaseLayout:
    """The decoder layers of SmolLM2-135M."""
    return BaseLayout(
        name="smollm2-135m-instruct",
        digest="",
        architecture="LlamaForCausalLM",
        model_type="llama",
        num_layers=30,
        hidden_size=576,
        vocab_size=49152,
        tied_head=True,
        layer_prefix="model.layers",
        groups=tuple(_shape(group, width, sizes) for group, (width, sizes) in LINEARS.items()),
        modules=(),
    )


def _shape(group: ModuleGroup, width: int, sizes: Sequence[int]) -> GroupShape:
    offsets = [sum(sizes[:index]) for index in range(len(sizes))]
    parts = (ModuleSlice(f"{group}.{o}", o, n) for o, n in zip(offsets, sizes, strict=True))
    return GroupShape(group, 30, width, tuple(parts))


class LoraBench:
    """Random adapters of the given ranks in pages, and the step's 120 calls."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.capabilities = Capabilities()
        layout = smollm2_layout()
        choice = choose_lora_op(DTYPE, torch.device("cpu"))
        config = AdapterPoolConfig(1 << 30, len(ranks), 64, DTYPE, torch.device("cpu"))
        self.layout = layout
        self.pages = AdapterPages(config, layout, choice.op)
        self.layers = LoraLayers(self.pages, choice, self.capabilities)
        self.adapters = [self._adapter(rank) for rank in ranks]

    def _adapter(self, rank: int) -> Allocation:
        terms = tuple(
            LoraTerm(
                shape.group,
                layer,
                part.offset,
                torch.randn(rank, shape.in_features) / 30,
                torch.randn(part.out_features, rank) / 30,
            )
            for shape in self.layout.groups
            for layer in range(shape.layers)
            for part in shape.slices
        )
        weights = AdapterWeights(f"rank {rank}", terms, ())
        allocation = self.pages.allocate(self.pages.need(weights))
        if allocation is None:
            raise MemoryError("the benchmark's adapters do not fit its pages")
        self.pages.write(allocation, weights)
        return allocation

    def step(self, batch: LoraBatch) -> Callable[[], None]:
        """The calls of one step, each on its own activations."""
        tokens = int(batch.starts[-1])
        calls = []
        for shape in self.layout.groups:
            x = torch.randn(tokens, shape.in_features).to(DTYPE)
            y = torch.zeros(tokens, shape.out_features, dtype=DTYPE)
            calls.append((shape.group, x, y))

        def run() -> None:
            for layer in range(self.layout.num_layers):
                for group, x, y in calls:
                    self.layers.apply(group, layer, x, y, batch)

        return run

    def measure(
        self, name: str, segments: Sequence[tuple[int, int]], bandwidth: float
    ) -> LoraTiming:
        """Time a step of (adapter index, tokens) segments; each adapter's pages count once."""
        used = {index for index, _ in segments}
        active = sum(self.adapters[index].need.num_bytes for index in used)
        batch = lora_batch([(self.adapters[index], tokens) for index, tokens in segments])
        seconds = median_seconds(self.step(batch))
        return LoraTiming(name, seconds * 1e3, active, active / bandwidth * 1e3)


def median_seconds(run: Callable[[], None], rounds: int = 15) -> float:
    """Median time of `run` after two warm-up rounds."""
    times = []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[rounds // 2]


def base_gemms(tokens: int) -> float:
    """Seconds of the base's own linears for `tokens` tokens, in all 30 layers."""
    calls = [
        (torch.randn(tokens, width).to(DTYPE), torch.randn(sum(sizes), width).to(DTYPE))
        for width, sizes in LINEARS.values()
    ]

    def run() -> None:
        for _ in range(30):
            for x, weight in calls:
                torch.nn.functional.linear(x, weight)

    return median_seconds(run, rounds=5)


def main() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    bandwidth = read_bandwidth()
    bench = LoraBench(THROUGHPUT_RANKS)
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, {torch.get_num_threads()} threads")
    everyone = [(index, 1) for index in range(len(THROUGHPUT_RANKS))]
    print(bench.measure("16 tokens, 16 adapters", everyone, bandwidth).line())
    print(bench.measure("16 tokens, one of rank 16", [(0, 16)], bandwidth).line())
    print(bench.measure("1 token, one of rank 16", [(0, 1)], bandwidth).line())
    prefill = bench.measure("512 tokens, one of rank 16", [(0, 512)], bandwidth)
    base = base_gemms(512) * 1e3
    print(prefill.line())
    print(f"512 tokens: the base's linears {base:.1f} ms, LoRA {prefill.ms / base:.0%} of that")
    for ledger in bench.capabilities.ledgers():
        print(f"{ledger.name}: {ledger.implementation}, engaged {ledger.engaged}")


if __name__ == "__main__":
    main()
