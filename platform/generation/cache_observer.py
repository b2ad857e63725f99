"""What the prefix cache did for each finished sequence: counted, and kept for the tenant to see."""

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from polyloom.platform.engine.messages import CacheOutcome
from polyloom.platform.generation.cache_misses import RecentMisses
from polyloom.platform.telemetry.prefix_cache import PrefixCacheMetrics
from polyloom.routing.request import GenerationRequest

if TYPE_CHECKING:
    from polyloom.platform.generation.inference import Target


class CacheObserver:
    """Called once a request."""

    def __init__(self, metrics: PrefixCacheMetrics) -> None:
        self.misses = RecentMisses()
        self._metrics = metrics

    def record(
        self,
        target: "Target",
        outcomes: Sequence[tuple[GenerationRequest, CacheOutcome]],
        at: datetime,
    ) -> None:
        """Outcomes of one request's sequences."""
        resolution = target.resolution
        revision = "base" if resolution.adapter_name is None else resolution.label
        for request, outcome in outcomes:
            self._metrics.record(target.tenant.slug, revision, outcome)
            if outcome.miss is not None and request.cache is not None:
                self.misses.record(
                    target.tenant.slug,
                    request.cache,
                    outcome.miss,
                    at=at,
                    request_id=target.request_id,
                    model=resolution.label,
                    tokenizer=target.format.tokenizer,
                )
