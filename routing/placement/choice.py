"""Which of several engines runs a request: the one that has done most of its work already.

In this order: the engine that the request's conversation is on; the one whose cache holds the
longest part of the prompt; one that has the adapter; the least loaded. An engine that is much busier
than the least loaded one is passed over, so affinity never queues behind itself.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

SLACK = 4
OVERLOAD = 2
"""An engine is overloaded above `OVERLOAD` times (the least load and `SLACK`)."""


@dataclass(frozen=True)
class EngineView:
    """What is known of one engine.

    load: sequences that wait or run.  hot: block hashes of cached chains.  resident: digests of
    adapters on the device.
    """

    available: bool = True
    load: int = 0
    hot: AbstractSet[str] = frozenset()
    resident: AbstractSet[str] = frozenset()


@dataclass(frozen=True)
class Wish:
    """What a request would like to find.

    chain: hashes of its prompt's whole blocks, first to last; empty if it shares nothing.
    home: the engine that its conversation is on.
    """

    chain: Sequence[str] = ()
    adapter_digest: str | None = None
    home: int | None = None
    recent: Mapping[str, int] = field(default_factory=dict)
    """Engines by block hash, of requests that were placed too lately to be in any view."""


def choose(engines: Sequence[EngineView], wish: Wish) -> int | None:
    """Index of the engine to run on; None if none is available."""
    available = [i for i, engine in enumerate(engines) if engine.available]
    if not available:
        return None
    least = min(engines[i].load for i in available)
    willing = [i for i in available if engines[i].load <= OVERLOAD * (least + SLACK)]
    if wish.home in willing:
        return wish.home
    return max(willing, key=lambda i: _merit(i, engines[i], wish))


def _merit(index: int, engine: EngineView, wish: Wish) -> tuple[int, bool, int, int]:
    resident = wish.adapter_digest is not None and wish.adapter_digest in engine.resident
    return (cached_blocks(index, engine, wish), resident, -engine.load, -index)


def cached_blocks(index: int, engine: EngineView, wish: Wish) -> int:
    """How many of the chain's blocks the engine holds or is about to hold. A block's hash stands
    for all before it, so the last that is found counts them."""
    for number in range(len(wish.chain), 0, -1):
        block = wish.chain[number - 1]
        if block in engine.hot or wish.recent.get(block) == index:
            return number
    return 0
