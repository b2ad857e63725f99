"""The states of a revision and the only ways between them.

    checking ──► ready ──► retired
       │ │         └─────► quarantined ──► retired
       │ └──► failed ──► retired
       └────► retired, quarantined

Only `ready` is ever routed to. `checking` and `ready` are live: they hold their blob.
"""

from datetime import datetime
from typing import cast

from polyloom.platform.db.models import LIVE_STATES, RevisionRow
from polyloom.platform.errors import Conflict
from polyloom.platform.services.views import RevisionState

_NEXT: dict[RevisionState, frozenset[RevisionState]] = {
    "checking": frozenset({"ready", "failed", "retired", "quarantined"}),
    "ready": frozenset({"retired", "quarantined"}),
    "failed": frozenset({"retired"}),
    "quarantined": frozenset({"retired"}),
    "retired": frozenset(),
}


def move_to(revision: RevisionRow, state: RevisionState, now: datetime) -> None:
    """Change the state; the adapter must be locked. Raises Conflict for a way that is not there."""
    present = cast(RevisionState, revision.state)
    if state not in _NEXT[present]:
        raise Conflict(f"revision {revision.number} is {present}: it cannot become {state}")
    revision.state = state
    revision.claimed_until = None
    if state not in LIVE_STATES and revision.ended_at is None:
        revision.ended_at = now
