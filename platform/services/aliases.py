"""Aliases: movable names on an adapter, with their history."""
class AliasService:
    def __init__(self, database: Database, routes_changed: Callable[[], Awaitable[None]], *, clock: Clock = system_clock) -> None: ...
    async def move(self, tenant_id: int, adapter: str, alias: str, number: int, *, author: str, reason: str | None = None) -> AliasView:
        """Raises NotFound, InvalidRequest (alias name), Conflict (revision not ready)."""
    async def rollback(self, tenant_id: int, adapter: str, alias: str, *, author: str, reason: str | None = None) -> AliasView:
        """Back to where the alias pointed before; again for one further back. Raises NotFound, Conflict (nothing older that is ready)."""
    async def get(self, tenant_id: int, adapter: str, alias: str) -> AliasView: ...
    async def history(self, tenant_id: int, adapter: str, alias: str) -> tuple[AliasChangeView, ...]:
        """Newest first."""
