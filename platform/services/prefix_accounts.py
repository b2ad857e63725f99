"""The accounts of prefix caches: the record of all that was, with what the engines hold now."""

from collections.abc import Iterable, Mapping, Sequence

from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.engine.messages import CacheReport, NamespaceCounters
from polyloom.platform.engine.pool import EnginePool
from polyloom.platform.periodic import Periodic
from polyloom.platform.services.invalidations import Invalidations
from polyloom.platform.services.prefix_records import (
    Identity,
    PrefixRecords,
    add,
    identity_of,
)
from polyloom.platform.services.prefix_views import (
    CacheAccount,
    CacheCounts,
    IsolationCheck,
    NamespaceCounts,
)
from polyloom.platform.services.snapshots import SnapshotService
from polyloom.routing.request import CacheOwner

LOOK_SECONDS = 2.0
KEEP_LOOKS = 30


class PrefixAccounts:
    """Keeps the record up with the engines, and reports."""

    def __init__(
        self,
        pool: EnginePool,
        records: PrefixRecords,
        invalidations: Invalidations,
        snapshots: SnapshotService,
    ) -> None:
        self._pool = pool
        self._records = records
        self._invalidations = invalidations
        self._snapshots = snapshots
        self._looks = 0
        self._looker = Periodic(self.look, LOOK_SECONDS)

    def start(self) -> None:
        """Look every few seconds."""
        self._looker.start()

    async def stop(self) -> None:
        """Record what the engines did last, then stop. Raises DatabaseUnavailable."""
        await self._looker.stop()
        await self.look()

    async def look(self) -> tuple[CacheReport, ...]:
        """Record what engines report and obey what other servers invalidated. The reports. Raises
        DatabaseUnavailable."""
        await self._invalidations.follow()
        try:
            reports = tuple((await self._pool.cache_reports()).values())
        except EngineUnavailableError:
            return ()
        await self._records.absorb(reports)
        if self._looks % KEEP_LOOKS == 0:
            await self._records.keep(report.boot for report in reports)
        self._looks += 1
        return reports

    async def account(self, owner: CacheOwner | None = None) -> CacheAccount:
        """Of one owner, or of all. Raises DatabaseUnavailable."""
        reports = await self.look()
        now = _blocks_now(reports)
        names = self._revision_names(owner)
        recorded = await self._records.totals(owner)
        namespaces = tuple(_namespace(n, now, names) for n in recorded)
        total = _total(recorded, [now.get(identity_of(n), (0, 0)) for n in recorded])
        return CacheAccount(
            total=total,
            namespaces=namespaces,
            invalidations=await self._invalidations.latest(owner),
            isolation=IsolationCheck(
                checked_hits=None if owner else sum(r.checked_hits for r in reports),
                cross_namespace_hits=sum(r.cross_namespace_hits for r in reports),
            ),
            engines=len(reports),
        )

    def _revision_names(self, owner: CacheOwner | None) -> dict[str, tuple[str, ...]]:
        """By content. A tenant sees its own names alone."""
        found: dict[str, list[str]] = {}
        for key, adapter in self._snapshots.current.adapters.items():
            if owner is not None and owner != CacheOwner("tenant", key.tenant):
                continue
            prefix = "" if owner is not None else f"{key.tenant}/"
            for revision in adapter.revisions.values():
                label = f"{prefix}{key.name}@{revision.number}"
                found.setdefault(revision.source.digest, []).append(label)
        return {digest: tuple(sorted(labels)) for digest, labels in found.items()}


def _blocks_now(reports: Iterable[CacheReport]) -> dict[Identity, tuple[int, int]]:
    """Cached and held blocks of each namespace, over the engines."""
    found: dict[Identity, tuple[int, int]] = {}
    for report in reports:
        for namespace in report.namespaces:
            blocks, held = found.get(identity_of(namespace), (0, 0))
            found[identity_of(namespace)] = (
                blocks + namespace.blocks,
                held + namespace.held_blocks,
            )
    return found


def _namespace(
    counters: NamespaceCounters,
    now: Mapping[Identity, tuple[int, int]],
    names: Mapping[str, tuple[str, ...]],
) -> NamespaceCounts:
    digest = counters.adapter_digest
    return NamespaceCounts(
        owner=counters.owner,
        base_digest=counters.base_digest,
        adapter_digest=digest,
        revisions=() if digest is None else names.get(digest, ()),
        counts=_counts(counters, now.get(identity_of(counters), (0, 0))),
    )


def _total(recorded: Sequence[NamespaceCounters], now: Sequence[tuple[int, int]]) -> CacheCounts:
    total = NOTHING
    for counters in recorded:
        total = add(total, counters)
    return _counts(total, (sum(blocks for blocks, _ in now), sum(held for _, held in now)))


def _counts(counters: NamespaceCounters, now: tuple[int, int]) -> CacheCounts:
    eligible = counters.eligible
    return CacheCounts(
        eligible_requests=eligible,
        exact_hits=counters.hits,
        hit_rate=counters.hits / eligible if eligible else None,
        tokens_reused=counters.tokens_reused,
        bytes_reused=counters.bytes_reused,
        prefill_seconds_saved=counters.saved,
        evictions=counters.evictions,
        invalidations=counters.invalidations,
        misses=counters.misses,
        cached_blocks=now[0],
        held_blocks=now[1],
    )


NOTHING = NamespaceCounters(
    owner=CacheOwner("tenant", ""),
    base_digest="",
    adapter_digest=None,
    eligible=0,
    hits=0,
    tokens_reused=0,
    bytes_reused=0,
    saved=0.0,
    evictions=0,
    invalidations={},
    misses={},
    blocks=0,
    held_blocks=0,
)
