"""Random paged contexts, and what attention over them is in float64."""

from dataclasses import dataclass

import numpy as np
import torch

from polyloom.kvcache.batch import AttentionBatch
from polyloom.kvcache.kernels import cuda_attention
from polyloom.kvcache.kernels.cuda_attention_plan import AttentionPlan, plan_attention


@dataclass(frozen=True)
class AttentionShape:
    """Heads and blocks of one cache. rotary: dimensions that are rotated, 0 for none."""

    kv_heads: int
    group: int
    dim: int
    block_size: int = 16
    rotary: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


class AttentionCase:
    """Sequences of `contexts` tokens, the last `counts` of them new in this step.

    Every place of the cache that holds no token is NaN, and every table entry beyond a context
    points far outside. eight_bits: the cache is int8 with a scale a token and head.
    """

    def __init__(
        self,
        shape: AttentionShape,
        contexts: list[int],
        counts: list[int],
        dtype: torch.dtype,
        *,
        eight_bits: bool = False,
        seed: int = 0,
    ) -> None:
        self.shape, self.contexts, self.counts, self.dtype = shape, contexts, counts, dtype
        self.random = torch.Generator().manual_seed(seed)
        blocks = [-(-context // shape.block_size) for context in contexts]
        self.num_blocks = sum(blocks) + 2
        free = torch.randperm(self.num_blocks, generator=self.random).tolist()
        self.tables = torch.full((len(contexts), max(blocks) + 1), -(2**30), dtype=torch.int32)
        for s, count in enumerate(blocks):
            for i in range(count):
                self.tables[s, i] = free.pop()
        self._fill(eight_bits)
        total = sum(counts)
        width = (shape.heads + 2 * shape.kv_heads) * shape.dim
        packed = torch.randn(total, width, generator=self.random).to(dtype)
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads]
        self.q, self.k, self.v = packed.view(total, -1, shape.dim).split(sizes, 1)
        angles = torch.rand(total, max(shape.rotary // 2, 1), generator=self.random) * 6.28
        turns = torch.cat((angles, angles), -1)
        self.rotation = (turns.cos().to(dtype), turns.sin().to(dtype)) if shape.rotary else None

    @property
    def batch(self) -> AttentionBatch:
        positions = [
            position
            for context, count in zip(self.contexts, self.counts, strict=True)
            for position in range(context - count, context)
        ]
        return AttentionBatch(
            query_starts=torch.tensor(np.cumsum([0, *self.counts]), dtype=torch.int32),
            context_lens=torch.tensor(self.contexts, dtype=torch.int32),
            block_tables=self.tables,
            slot_mapping=torch.tensor(self._slots()),
            positions=torch.tensor(positions),
        )

    def plan(self) -> AttentionPlan:
        return plan_attention(self.batch, self.q.device)

    def move(self, device: torch.device) -> None:
        """Everything that `run` reads goes to `device`; `expected` is to be asked before."""
        for name in ("q", "k", "v", "keys", "values"):
            setattr(self, name, getattr(self, name).to(device))
        for name in ("scales", "rotation"):
            pair = getattr(self, name)
            setattr(self, name, pair and tuple(part.to(device) for part in pair))

    def run(
        self,
        *,
        scale: float = 0.2,
        window: int | None = None,
        softcap: float | None = None,
        plan: AttentionPlan | None = None,
    ) -> torch.Tensor:
        """Append the step's tokens, then attend; [T, H * D]."""
        plan = plan or self.plan()
        cuda_attention.append(
            self.q, self.k, self.v, self.keys, self.values, self.scales, plan.slots, self.rotation
        )
        return cuda_attention.attend(
            self.q, self.keys, self.values, self.scales, plan,
            scale=scale, window=window, softcap=softcap,
        )  # fmt: skip

    def expected(
        self, *, scale: float = 0.2, window: int | None = None, softcap: float | None = None
    ) -> torch.Tensor:
        """Of the same queries and of what the cache holds, before `run` changes either."""
        shape, first, result = self.shape, 0, []
        q = _rotated(self.q.double(), self.rotation).to(self.dtype).double()
        new_k = _rotated(self.k.double(), self.rotation)
        for s, (context, count) in enumerate(zip(self.contexts, self.counts, strict=True)):
            own = slice(first, first + count)
            first += count
            old = context - count
            k = torch.cat((self._context(self.keys, 0, s, old), self._stored(new_k[own])))
            v = torch.cat(
                (self._context(self.values, 1, s, old), self._stored(self.v[own].double()))
            )
            k, v = (part.repeat_interleave(shape.group, 1) for part in (k, v))
            scores = torch.einsum("thd,lhd->htl", q[own], k) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            query, key = torch.arange(old, context)[:, None], torch.arange(context)
            seen = (key <= query) & (key > query - (window or context + 1))
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            result.append(torch.einsum("htl,lhd->thd", weights, v).flatten(1))
        return torch.cat(result)

    def _fill(self, eight_bits: bool) -> None:
        shape = self.shape
        cache = (self.num_blocks, shape.kv_heads, shape.block_size, shape.dim)
        self.scales = None
        if eight_bits:
            self.keys, self.values = (torch.full(cache, 99, dtype=torch.int8) for _ in range(2))
            self.scales = (torch.full(cache[:3], float("nan")), torch.full(cache[:3], float("nan")))
        else:
            self.keys, self.values = (
                torch.full(cache, float("nan"), dtype=self.dtype) for _ in range(2)
            )
        for s, (context, count) in enumerate(zip(self.contexts, self.counts, strict=True)):
            for position in range(context - count):
                block, place = self._place(s, position)
                for which, part in enumerate((self.keys, self.values)):
                    token = torch.randn(shape.kv_heads, shape.dim, generator=self.random)
                    if self.scales is not None:
                        largest = token.abs().amax(-1)
                        self.scales[which][block, :, place] = largest / 127
                        token = (token / largest[:, None] * 127).round()
                    part[block, :, place] = token.to(part.dtype)

    def _stored(self, new: torch.Tensor) -> torch.Tensor:
        """Values as the cache will hold them: [n, G, D] float64."""
        if self.scales is None:
            return new.to(self.dtype).double()
        largest = new.float().abs().amax(-1, keepdim=True)
        return ((new / largest * 127).round() * (largest.double() / 127)).double()

    def _context(self, cache: torch.Tensor, which: int, s: int, length: int) -> torch.Tensor:
        shape = self.shape
        places = [self._place(s, position) for position in range(length)]
        if not places:
            return torch.zeros(0, shape.kv_heads, shape.dim, dtype=torch.float64)
        tokens = torch.stack([cache[block, :, place] for block, place in places]).double()
        if self.scales is None:
            return tokens
        scales = torch.stack([self.scales[which][block, :, place] for block, place in places])
        return tokens * scales.double()[..., None]

    def _place(self, s: int, position: int) -> tuple[int, int]:
        block, place = divmod(position, self.shape.block_size)
        return int(self.tables[s, block]), place

    def _slots(self) -> list[int]:
        return [
            block * self.shape.block_size + place
            for s, (context, count) in enumerate(zip(self.contexts, self.counts, strict=True))
            for block, place in (self._place(s, p) for p in range(context - count, context))
        ]


def _rotated(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    if rotation is None:
        return x
    cos, sin = (part.double()[:, None] for part in rotation)
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, rest), -1)
