"""Tenants: who shares the server, and how much each may use."""
class TenantService:
    def __init__(self, database: Database, announcements: Announcements) -> None: ...
    async def create(self, slug: str, limits: TenantLimits = TenantLimits(), *, author: str) -> TenantView:
        """Raises InvalidRequest (slug), Conflict (taken)."""
    async def get(self, slug: str) -> TenantView:
        """Raises NotFound."""
    async def list(self) -> tuple[TenantView, ...]: ...
    async def set_limits(self, slug: str, limits: TenantLimits, *, author: str) -> TenantView: ...
    async def set_state(self, slug: str, state: TenantState, *, author: str) -> TenantView:
        """Disable or enable; a disabled tenant's keys stop working within a second everywhere."""
