"""A closed load on one engine: every stream sends a prompt, reads its tokens, and is timed."""

import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from polyloom.adapters.source import AdapterSource
from polyloom.platform.engine.client import EngineClient
from polyloom.platform.engine.messages import Finished, Tokens
from polyloom.routing.combination import Combination
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams

_sequence_numbers = itertools.count()


@dataclass(frozen=True)
class StreamTimes:
    """Seconds of one stream: to its first token, and between its later ones."""

    first: float
    gaps: tuple[float, ...]
    tokens: int


@dataclass(frozen=True)
class LoadResult:
    """All streams of one load."""

    seconds: float
    streams: tuple[StreamTimes, ...]

    @property
    def tokens_per_second(self) -> float:
        return sum(stream.tokens for stream in self.streams) / self.seconds

    @property
    def ttft(self) -> float:
        """Median seconds to the first token."""
        return statistics.median(stream.first for stream in self.streams)

    @property
    def itl(self) -> float:
        """Median seconds between tokens; with all streams decoding, the time of a step."""
        return statistics.median(gap for stream in self.streams for gap in stream.gaps)


def request(
    base_digest: str,
    source: AdapterSource | None,
    prompt: Sequence[int],
    output_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    logprobs: int | None = None,
) -> GenerationRequest:
    """A request for exactly `output_tokens` tokens."""
    combination = Combination(
        base_digest=base_digest,
        template_digest="none",
        adapter_digest=None if source is None else source.digest,
    )
    return GenerationRequest(
        sequence_id=f"bench-{next(_sequence_numbers)}",
        tenant="bench",
        combination=combination,
        adapter=source,
        prompt=tuple(prompt),
        sampling=SamplingParams(
            max_tokens=output_tokens, seed=seed, temperature=temperature, logprobs=logprobs
        ),
    )


async def run_stream(client: EngineClient, work: GenerationRequest) -> StreamTimes:
    """Generate once; raises RuntimeError if it ends otherwise than by its length."""
    start = last = time.perf_counter()
    first, gaps, tokens = 0.0, list[float](), 0
    async for event in client.generate(work):
        now = time.perf_counter()
        match event:
            case Tokens(token_ids=ids):
                if tokens == 0:
                    first = now - start
                else:
                    gaps.append((now - last) / len(ids))
                tokens, last = tokens + len(ids), now
            case Finished(reason=reason, error=error):
                if reason != "length":
                    raise RuntimeError(f"{work.sequence_id} ended with {reason}: {error}")
    return StreamTimes(first, tuple(gaps), tokens)


async def run_load(client: EngineClient, works: Sequence[GenerationRequest]) -> LoadResult:
    """All of `works` at once."""
    start = time.perf_counter()
    streams = await asyncio.gather(*(run_stream(client, work) for work in works))
    return LoadResult(time.perf_counter() - start, tuple(streams))
