"""The audit trail."""
class AuditService:
    def __init__(self, database: Database) -> None: ...
    async def entries(self, *, tenant_id: int | None = None, before_id: int | None = None, limit: int = 100) -> tuple[AuditEntry, ...]:
        """Newest first."""
