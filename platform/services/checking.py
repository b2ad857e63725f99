"""Runs the checks of new revisions, one at a time, off the request path.

The queue is the record itself: revisions in `checking` that no process has claimed. So a check that
a crash interrupted is taken up again by whoever looks next.
"""

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from typing import Protocol

from polyloom.platform.cancelling import being_cancelled
from polyloom.platform.errors import Conflict, DeadlineExceeded, Unavailable
from polyloom.platform.services.adapters import CLAIM_SECONDS, AdapterRegistry
from polyloom.platform.services.views import (
    CheckJob,
    FidelityVerdict,
    PromotionVerdict,
    RevisionView,
)

log = logging.getLogger(__name__)


class RevisionCheck(Protocol):
    """How a revision is judged."""

    async def __call__(self, job: CheckJob) -> FidelityVerdict:
        """Fidelity against PEFT, then a probe generation. Raises Unavailable (such as
        EngineUnavailable) when nothing could be said and it must be tried again; any other error is
        a verdict of failure."""


class PromotionCheck(Protocol):
    """Whether a revision that passed its check may take the alias that its upload asked for."""

    async def __call__(self, job: CheckJob) -> PromotionVerdict | None:
        """None if it asked for none. Raises Unavailable when it must be tried again; any other
        error leaves the alias where it is."""


class RevisionChecker:
    """Claims, checks and settles revisions while it runs."""

    def __init__(
        self,
        registry: AdapterRegistry,
        check: RevisionCheck,
        base_digests: Collection[str],
        *,
        promotion: PromotionCheck | None = None,
        poll_interval: float = 1.0,
    ) -> None:
        """base_digests: bases that this process can check against.  promotion: None: there are no
        gates."""
        self._registry = registry
        self._check = check
        self._base_digests = tuple(base_digests)
        self._promotion = promotion
        self._poll_interval = poll_interval
        self._woken = asyncio.Event()
        self._settled = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin with what is waiting."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop now; the check under way is given back for another process."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def wake(self) -> None:
        """A revision has begun: look at once."""
        self._woken.set()

    async def settled(self, revision: RevisionView, timeout: float) -> RevisionView:
        """The revision once it is not `checking` any more, whichever process checks it. Raises
        DeadlineExceeded after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):
                while revision.state == "checking":
                    await self._next_settlement()
                    revision = await self._registry.revision_by_id(revision.id)
        except TimeoutError as error:
            raise DeadlineExceeded(f"{revision.label} is still being checked") from error
        return revision

    async def _next_settlement(self) -> None:
        async with self._settled:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_interval):
                    await self._settled.wait()

    async def _run(self) -> None:
        while not being_cancelled():
            self._woken.clear()
            if not await self._check_one():
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_interval):
                        await self._woken.wait()

    async def _check_one(self) -> bool:
        """Whether a revision was found and settled."""
        try:
            for job in await self._registry.claim_checks(self._base_digests):
                return await self._settle(job)
        except Unavailable as error:
            log.warning("revisions cannot be checked now: %s", error)
        return False

    async def _settle(self, job: CheckJob) -> bool:
        renewal = asyncio.create_task(self._renew(job.revision.id))
        try:
            verdict = await self._verdict(job)
            promotion = await self._promotion_verdict(job) if verdict.passed else None
        except (Unavailable, asyncio.CancelledError):
            renewal.cancel()
            await asyncio.shield(self._registry.renew_claim(job.revision.id, 0))
            raise
        finally:
            renewal.cancel()
        with suppress(Conflict):  # retired or quarantined meanwhile
            await self._registry.settle(job.revision.id, verdict, promotion)
        async with self._settled:
            self._settled.notify_all()
        return True

    async def _verdict(self, job: CheckJob) -> FidelityVerdict:
        try:
            return await self._check(job)
        except Unavailable:
            raise
        except Exception:
            log.exception("the check of %s ended unexpectedly", job.revision.label)
            return FidelityVerdict(
                max_logprob_diff=None, failure="the check of the revision ended unexpectedly"
            )

    async def _promotion_verdict(self, job: CheckJob) -> PromotionVerdict | None:
        if self._promotion is None:
            return None
        try:
            return await self._promotion(job)
        except Unavailable:
            raise
        except Exception:
            log.exception("the gate of %s ended unexpectedly", job.revision.label)
            return PromotionVerdict(job.promote or "", "its gate ended unexpectedly")

    async def _renew(self, revision_id: int) -> None:
        while True:
            await asyncio.sleep(CLAIM_SECONDS / 3)
            try:
                await self._registry.renew_claim(revision_id)
            except Unavailable as error:
                log.warning("a check's claim was not renewed: %s", error)
