"""API keys: issue, revoke, authenticate."""
class KeyService:
    def __init__(self, database: Database, announcements: Announcements, *, admin_key: str | None = None, clock: Clock = system_clock) -> None: ...
    async def issue(self, tenant: str, scopes: Collection[Scope], *, author: str, expires_at: datetime | None = None) -> IssuedKey:
        """Raises NotFound (tenant slug), InvalidRequest (scopes empty or unknown, expiry past)."""
    async def list(self, tenant: str) -> tuple[KeyView, ...]: ...
    async def revoke(self, tenant: str, key_id: int, *, author: str) -> KeyView:
        """Raises NotFound. Takes effect within a second in every process."""
    async def authenticate(self, key: str) -> Principal:
        """Raises InvalidApiKey; DatabaseUnavailable."""
