"""Which implementation of each op runs, and what it did: the ledger behind `/admin/capabilities`.

Every op exists as `reference` (plain torch, the contract), and may exist as `cpu` (C++) and `cuda`
(CuPy). The choice is made once, when the engine starts. A call that cannot use the chosen
implementation (a dtype or shape it does not cover, no compiler) falls back to `reference`, is
counted by reason, and is logged the first time.
"""

import logging
from collections import Counter
from dataclasses import dataclass, field

logger = logging.getLogger("polyloom.kernels")


@dataclass
class OpLedger:
    """Counts of one op.

    why: this implementation.  kernels: compiled for it.  buckets: sizes that graphs exist for.
    seconds: spent on compiling those kernels or capturing those graphs.
    """

    name: str
    implementation: str
    why: str = ""
    kernels: tuple[str, ...] = ()
    buckets: tuple[int, ...] = ()
    seconds: float = 0.0
    engaged: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def fell_back(self, reason: str) -> None:
        """Count a call that ran on `reference` although something faster was chosen."""
        if reason not in self.fallbacks:
            logger.warning(
                "%s (%s) falls back to reference: %s", self.name, self.implementation, reason
            )
        self.fallbacks[reason] += 1


class Capabilities:
    """All ledgers of one engine."""

    def __init__(self) -> None:
        self._ledgers: dict[str, OpLedger] = {}

    def register(
        self,
        name: str,
        implementation: str,
        why: str = "",
        kernels: tuple[str, ...] = (),
        seconds: float = 0.0,
    ) -> OpLedger:
        """Declare which implementation of `name` was chosen; a second call replaces the first."""
        ledger = OpLedger(name, implementation, why, kernels, seconds=seconds)
        self._ledgers[name] = ledger
        return ledger

    def ledgers(self) -> tuple[OpLedger, ...]:
        return tuple(self._ledgers.values())
