"""What prompts lately missed the prefix cache by, for the tenant that sent them.

Token ids are kept, bounded by tenant and in tenants, and become text only when they are asked for.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import datetime

import msgspec

from polyloom.platform.engine.messages import CacheMiss, MissReason
from polyloom.platform.generation.detokenize import rendered
from polyloom.platform.generation.tokenizers import TextTokenizer
from polyloom.routing.request import CacheScope

MISSES_PER_TENANT = 20
TENANTS = 1_000


class MissView(msgspec.Struct, frozen=True, kw_only=True):
    """One request whose prompt was not wholly in the cache.

    position: index of the first token that differs from the most similar earlier prompt.  before,
    expected, found: text up to there, and from there on in the earlier prompt and in this one.
    """

    at: datetime
    request_id: str
    model: str
    reason: MissReason
    position: int | None = None
    before: str = ""
    expected: str = ""
    found: str = ""


@dataclass(frozen=True)
class _Miss:
    at: datetime
    request_id: str
    model: str
    miss: CacheMiss
    tokenizer: TextTokenizer


class RecentMisses:
    """The last misses of each tenant, in this process."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, deque[_Miss]] = OrderedDict()

    def record(
        self,
        tenant: str,
        scope: CacheScope,
        miss: CacheMiss,
        *,
        at: datetime,
        request_id: str,
        model: str,
        tokenizer: TextTokenizer,
    ) -> None:
        """Keep a miss. In a cache that is shared between tenants the earlier prompt may be another
        tenant's, so that its tokens are not kept."""
        if scope.owner.kind != "tenant":
            miss = CacheMiss(miss.reason, miss.position)
        kept = self._tenants.setdefault(tenant, deque(maxlen=MISSES_PER_TENANT))
        self._tenants.move_to_end(tenant)
        kept.append(_Miss(at, request_id, model, miss, tokenizer))
        if len(self._tenants) > TENANTS:
            self._tenants.popitem(last=False)

    def of(self, tenant: str) -> tuple[MissView, ...]:
        """Newest first."""
        return tuple(_view(miss) for miss in reversed(self._tenants.get(tenant, ())))

    def forget(self, tenant: str) -> None:
        """Its prompts are to be gone."""
        self._tenants.pop(tenant, None)


def _view(kept: _Miss) -> MissView:
    miss = kept.miss
    before, expected, found = (
        rendered(kept.tokenizer, ids) for ids in (miss.before, miss.expected, miss.found)
    )
    return MissView(
        at=kept.at,
        request_id=kept.request_id,
        model=kept.model,
        reason=miss.reason,
        position=miss.position,
        before=before,
        expected=expected,
        found=found,
    )
