"""Bases: which base models this record knows."""
class BaseService:
    def __init__(self, database: Database, routes_changed: Callable[[], Awaitable[None]]) -> None: ...
    async def register(self, *, name: str, digest: str, folder: str, template_digest: str, config: str) -> BaseView:
        """Record a base, or update the folder and name of a known digest. config: the model's config.json text."""
    async def get(self, digest: str) -> BaseView:
        """Raises NotFound."""
    async def list(self) -> tuple[BaseView, ...]: ...
