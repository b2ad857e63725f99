"""Keeps the in-memory routing snapshot up to date."""
class SnapshotService:
    def __init__(self, database: Database, blobs: BlobStore, announcements: Announcements, *, served: Collection[str], poll_interval: float = 1.0) -> None:
        """served: digests of the bases whose engines this server has."""
    @property
    def current(self) -> RouteSnapshot: ...
    async def refresh(self) -> RouteSnapshot: ...
    async def routes_changed(self) -> None:
        """After a committed change: refresh here, announce to the others. Pass this to AdapterRegistry, AliasService, BaseService."""
    async def start(self) -> None:
        """First load (raises DatabaseUnavailable), then polling and announcements in the background."""
    async def stop(self) -> None: ...
