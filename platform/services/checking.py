"""Runs the checks of new revisions, off the request path."""
class RevisionCheck(Protocol):
    async def __call__(self, job: CheckJob) -> FidelityVerdict:
        """Fidelity against PEFT, then a probe generation. Raises CheckInterrupted-like errors (any Unavailable) when it must be tried again later."""
class RevisionChecker:
    def __init__(self, registry: AdapterRegistry, check: RevisionCheck, *, poll_interval: float = 1.0) -> None: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    def wake(self) -> None:
        """A revision has begun."""
    async def settled(self, revision: RevisionView, timeout: float) -> RevisionView:
        """Wait until it is no longer `checking` (also when another process checks it). Raises DeadlineExceeded."""
