"""Which running sequences give way: to one that waits, or to one that grows."""

from collections import defaultdict
from collections.abc import Iterator

from polyloom.routing.scheduler.fairness import FairShares
from polyloom.routing.scheduler.sequence import Sequence


class RunningShares:
    """The running sequences by tenant, at one moment.

    What a tenant holds is measured in running sequences per weight: each brings one token a step.
    """

    def __init__(self, running: list[Sequence]) -> None:
        """running: oldest first."""
        self._running = running
        self._by_tenant: defaultdict[str, list[Sequence]] = defaultdict(list)
        for sequence in running:
            self._by_tenant[sequence.tenant].append(sequence)

    def over_share(self, sequence: Sequence, shares: FairShares) -> Iterator[Sequence]:
        """Those that give way to `sequence`, first the youngest of the tenant that holds most.

        Only tenants give that hold, even then, no less than `sequence`'s will: so nothing is
        given back and forth, and a tenant's oldest stays. And only those that have been served no
        less than it.
        """
        held = {tenant: len(sequences) for tenant, sequences in self._by_tenant.items()}
        will_hold = (held.pop(sequence.tenant, 0) + 1) / sequence.weight
        served = shares.tenants[sequence.tenant]
        held = {tenant: n for tenant, n in held.items() if shares.tenants[tenant] >= served}
        while held:
            tenant = max(held, key=lambda tenant: held[tenant] / self._weight(tenant))
            held[tenant] -= 1
            if held[tenant] / self._weight(tenant) >= will_hold:
                yield self._by_tenant[tenant][held[tenant]]
            else:
                del held[tenant]

    def younger(self, sequence: Sequence) -> Iterator[Sequence]:
        """Those that arrived after it, the youngest first."""
        return (s for s in reversed(self._running) if s.arrival > sequence.arrival)

    def to_grow(self) -> Sequence:
        """Which one gives its blocks back when a running one finds none.

        The youngest of the tenant that holds most; never the oldest of all while there is another,
        so that one always gets to its end.
        """
        candidates = self._running[1:] or self._running
        return max(reversed(candidates), key=lambda s: self._held(s.tenant))

    def _held(self, tenant: str) -> float:
        return len(self._by_tenant[tenant]) / self._weight(tenant)

    def _weight(self, tenant: str) -> float:
        return self._by_tenant[tenant][0].weight
