"""The registry of adapters and revisions."""
class AdapterRegistry:
    def __init__(self, database: Database, blobs: BlobStore, routes_changed: Callable[[], Awaitable[None]], *, clock: Clock = system_clock) -> None: ...
    async def begin_revision(self, tenant: TenantView, adapter: str, base_digest: str, content: RevisionContent, *, author: str, promote: str | None = None) -> BegunRevision:
        """Record validated content as the adapter's next revision, in state `checking`.
        The adapter is created by its first revision. Content that is a live (checking or ready) revision of this adapter already: that one, created=False. promote: alias moved when it turns ready (at once if ready).
        Raises InvalidRequest (names), NotFound (base), QuotaExceeded."""
    async def list(self, tenant_id: int) -> tuple[AdapterView, ...]: ...
    async def get(self, tenant_id: int, adapter: str) -> AdapterView:
        """Raises NotFound."""
    async def revision(self, tenant_id: int, adapter: str, number: int) -> RevisionView:
        """Raises NotFound."""
    async def retire(self, tenant_id: int, adapter: str, number: int, *, author: str) -> RevisionView:
        """Raises NotFound. Retiring twice is one retirement. The caller sends the engine's Retire for view.digest when `digest_live(digest)` is False."""
    async def is_live(self, digest: str) -> bool:
        """Whether any tenant's revision of this content is checking or ready."""
    async def quarantine(self, digest: str, reason: str) -> tuple[RevisionView, ...]:
        """Take every live revision of this content out of service (bytes rotted)."""
    async def claim_checks(self, limit: int = 1) -> tuple[CheckJob, ...]:
        """Claim revisions in `checking` that no process holds (new ones, and those a dead process left)."""
    async def settle(self, revision_id: int, verdict: FidelityVerdict) -> RevisionView:
        """checking -> ready (and the pending promotion) or failed. Raises Conflict if no longer checking."""
    async def collect_blobs(self, grace: float) -> int:
        """Remove blobs that no live revision refers to since `grace` seconds."""
