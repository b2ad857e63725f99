"""The engine's one waiting queue."""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, KeysView

from polyloom.routing.scheduler.errors import QueueFullError
from polyloom.routing.scheduler.fairness import FairLine, FairShares, merged
from polyloom.routing.scheduler.sequence import Sequence

_Line = OrderedDict[str, Sequence]


class WaitingQueue:
    """Sequences that do not run, in the order in which they may be admitted.

    Tenants take turns by what they are owed, and within a tenant its adapters do; of one adapter
    the order is that of arrival. Sequences that ran before go first within their tenant. Of a
    conversation only the earliest that has not been started is offered.
    """

    def __init__(self, limit: int, credit: float) -> None:
        """limit: sequences that may wait.  credit: as in `VirtualCounters`."""
        self.limit = limit
        self.shares = FairShares(credit)
        self._tenants: dict[str, _TenantLines] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no order that means anything."""
        for lines in self._tenants.values():
            yield from lines

    @property
    def tenants(self) -> KeysView[str]:
        """Those with a sequence here."""
        return self._tenants.keys()

    def append(self, sequence: Sequence) -> None:
        """Queue a new arrival.

        Where `limit` sequences wait already, a tenant with less than an equal share of them may
        still add to its own, so nobody can shut the others out; up to twice the limit in all.

        Raises:
            QueueFullError: no place is left for this tenant.
        """
        if self._length >= self.limit and not self._may_exceed(sequence.tenant):
            raise QueueFullError(self.limit)
        self._of(sequence).append(sequence)
        self._length += 1

    def put_back(self, sequence: Sequence) -> None:
        """Queue one that ran before its tenant's others; the limit does not apply to it."""
        self._of(sequence).put_back(sequence)
        self._length += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it stands."""
        lines = self._tenants[sequence.tenant]
        lines.remove(sequence)
        if not len(lines):
            del self._tenants[sequence.tenant]
        self._length -= 1

    def candidates(self, prefilling: Iterable[Sequence] = ()) -> Iterator[Sequence]:
        """All that want prompt tokens to run, in fair order, each tenant's `prefilling` first.

        prefilling: running sequences that are not through their prompts, oldest first. The queue
        may change meanwhile: what is offered next depends on whether the last one was removed.
        """
        running: defaultdict[str, list[Sequence]] = defaultdict(list)
        for sequence in prefilling:
            running[sequence.tenant].append(sequence)
        return merged(
            FairLine.start(
                self.shares.tenants[tenant],
                self._tenant_order(tenant, running[tenant]),
                weighted=True,
            )
            for tenant in sorted(running.keys() | self._tenants.keys())
        )

    def _may_exceed(self, tenant: str) -> bool:
        own = len(self._tenants[tenant]) if tenant in self._tenants else 0
        share = self.limit // len(self._tenants.keys() | {tenant})
        return own < share and self._length < 2 * self.limit

    def _tenant_order(self, tenant: str, running: list[Sequence]) -> Iterator[Sequence]:
        yield from running
        lines = self._tenants.get(tenant)
        if lines is not None:
            yield from lines.in_order()

    def _of(self, sequence: Sequence) -> "_TenantLines":
        tenant = sequence.tenant
        if tenant not in self._tenants:
            self.shares.tenants.begin_waiting(tenant, self._tenants, sequence.weight)
            self._tenants[tenant] = _TenantLines(self.shares, tenant)
        return self._tenants[tenant]


class _TenantLines:
    """One tenant's waiting sequences; never empty but for a moment."""

    def __init__(self, shares: FairShares, tenant: str) -> None:
        self._counters = shares.adapters(tenant)
        self._returned: _Line = OrderedDict()
        self._adapters: dict[str | None, _Line] = {}
        self._conversations: defaultdict[str, _Line] = defaultdict(OrderedDict)

    def __len__(self) -> int:
        return len(self._returned) + sum(map(len, self._adapters.values()))

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._returned.values()
        for line in self._adapters.values():
            yield from line.values()

    def append(self, sequence: Sequence) -> None:
        digest, conversation = sequence.adapter_digest, sequence.request.conversation
        if digest not in self._adapters:
            self._counters.begin_waiting(digest, self._adapters)
            self._adapters[digest] = OrderedDict()
        self._adapters[digest][sequence.sequence_id] = sequence
        if conversation is not None:
            self._conversations[conversation][sequence.sequence_id] = sequence

    def put_back(self, sequence: Sequence) -> None:
        self._returned[sequence.sequence_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        sequence_id, digest = sequence.sequence_id, sequence.adapter_digest
        if self._returned.pop(sequence_id, None) is not None:
            return
        line = self._adapters[digest]
        del line[sequence_id]
        if not line:
            del self._adapters[digest]
        conversation = sequence.request.conversation
        if conversation is not None:
            turns = self._conversations[conversation]
            del turns[sequence_id]
            if not turns:
                del self._conversations[conversation]

    def in_order(self) -> Iterator[Sequence]:
        """Those that ran before by age, then the others as their adapters' counters say."""
        yield from sorted(self._returned.values(), key=lambda sequence: sequence.arrival)
        lines = [
            FairLine.start(self._counters[digest], tuple(line.values()), weighted=False)
            for digest, line in self._adapters.items()
        ]
        for sequence in merged(lines):
            if self._is_next_turn(sequence):
                yield sequence

    def _is_next_turn(self, sequence: Sequence) -> bool:
        conversation = sequence.request.conversation
        if conversation is None:
            return True
        return next(iter(self._conversations[conversation])) == sequence.sequence_id
