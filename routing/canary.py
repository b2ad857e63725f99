"""Which target of a route a conversation goes to: by weight, and the same one every time.

Weighted rendezvous hashing: each target draws, by a hash of (tenant, route, session, target), an
exponential arrival of its weight's rate, and the first to arrive is chosen. So target i gets
w_i / Σw of the sessions, and when one weight grows, sessions only move to that target: raising a
canary from 5 to 10 % keeps the 5 % on it.
"""

import hashlib
import math
from collections.abc import Sequence

from polyloom.routing.snapshot import RouteTarget


def choose(targets: Sequence[RouteTarget], tenant: str, route: str, session: str) -> RouteTarget:
    """The target of `session`. targets: of distinct models, with a positive weight among them."""
    candidates = [target for target in targets if target.weight > 0]
    return min(candidates, key=lambda t: _arrival(t.weight, tenant, route, session, t.model))


def _arrival(weight: int, *parts: str) -> float:
    return -math.log(_uniform(*parts)) / weight


def _uniform(*parts: str) -> float:
    """In (0, 1], by the length-framed parts: moving text from one part to the next changes it."""
    digest = hashlib.blake2b(digest_size=8, person=b"polyloom-route")
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return (int.from_bytes(digest.digest(), "big") + 1) / 2**64
