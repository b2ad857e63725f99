"""Virtual token counters: who is owed the next tokens.

The method is that of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): every
key has a counter of the tokens that ran for it, divided by its weight; the one with the smallest
goes first; one that begins to wait is lifted to near the smallest counter of those who wait already, so
nobody saves up much while they want nothing. Here it is applied twice: among tenants, and within
each tenant among its adapters, so a tenant's number of adapters does not change its share.
"""

import heapq
from collections.abc import Collection, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

from polyloom.routing.scheduler.batch import ScheduledSequence
from polyloom.routing.scheduler.sequence import Sequence

Key = TypeVar("Key", bound=Hashable)


class VirtualCounters(Generic[Key]):
    """Tokens per weight that ran for each key since somebody began to wait where nobody did.

    Before that moment everyone had what they wanted, so nobody is owed anything from then.
    """

    def __init__(self, credit: float) -> None:
        """credit: tokens by which one that begins to wait stays below the others, if it was: who
        sends a little now and then is then served before who always waits."""
        self._credit = credit
        self._served: dict[Key, float] = {}
        self._level = 0.0  # the largest smallest counter so far: those with credit do not lower it

    def __getitem__(self, key: Key) -> float:
        return self._served.get(key, 0.0)

    def charge(self, key: Key, amount: float) -> None:
        """Count `amount` tokens per weight for `key`."""
        self._served[key] = self[key] + amount

    def begin_waiting(self, key: Key, waiting: Collection[Key], weight: float = 1.0) -> None:
        """`key` begins to wait while the others of `waiting` do."""
        others = [self[other] for other in waiting if other != key]
        if others:
            self._level = max(self._level, min(others))
            self._served[key] = max(self[key], self._level - self._credit / weight)
        else:
            self._served.clear()
            self._level = 0.0


class FairShares:
    """The counters of all tenants and of their adapters (None: the base alone)."""

    def __init__(self, credit: float) -> None:
        """credit: of `VirtualCounters`, for both."""
        self.tenants: VirtualCounters[str] = VirtualCounters(credit)
        self._credit = credit
        self._adapters: dict[str, VirtualCounters[str | None]] = {}

    def adapters(self, tenant: str) -> VirtualCounters[str | None]:
        """Counters within one tenant."""
        return self._adapters.setdefault(tenant, VirtualCounters(self._credit))

    def ran(self, item: ScheduledSequence) -> None:
        """Charge the tokens of a step that are new.

        Those whose K and V came from the cache did not run. Those that run again because the
        scheduler took the sequence's blocks are not charged again: that was not the tenant's doing,
        and a sequence could otherwise be paid for without ever getting further.
        """
        sequence, end = item.sequence, item.start + item.num_tokens
        tokens = end - max(item.start, sequence.charged)
        if tokens > 0:
            sequence.charged = end
            self.tenants.charge(sequence.tenant, tokens / sequence.weight)
            self.adapters(sequence.tenant).charge(sequence.adapter_digest, tokens)


class FairLine:
    """Sequences of one key in their own order, and where the key's counter stands."""

    __slots__ = ("_rest", "_weighted", "head", "served")

    def __init__(self, served: float, rest: Iterator[Sequence], head: Sequence, weighted: bool):
        self.served = served
        self.head = head
        self._rest = rest
        self._weighted = weighted

    @classmethod
    def start(
        cls, served: float, sequences: Iterable[Sequence], *, weighted: bool
    ) -> "FairLine | None":
        """weighted: the counter is per weight of the sequence's tenant. None if there is none."""
        rest = iter(sequences)
        head = next(rest, None)
        return None if head is None else cls(served, rest, head, weighted)

    def advance(self) -> bool:
        """Count the head as if it had been served whole; is there a next one?"""
        self.served += self.head.remaining / (self.head.weight if self._weighted else 1.0)
        following = next(self._rest, None)
        if following is None:
            return False
        self.head = following
        return True

    def __lt__(self, other: "FairLine") -> bool:
        return (self.served, self.head.arrival) < (other.served, other.head.arrival)


def merged(lines: Iterable[FairLine | None]) -> Iterator[Sequence]:
    """All sequences, always the next of the line that is owed most.

    Each counts as served whole once it is passed, whatever became of it, so the order is also the
    one in which to prepare for those that cannot run yet. A line is read on only after its last
    one was dealt with.
    """
    heap = [line for line in lines if line is not None]
    heapq.heapify(heap)
    while heap:
        line = heap[0]
        yield line.head
        if line.advance():
            heapq.heapreplace(heap, line)
        else:
            heapq.heappop(heap)
