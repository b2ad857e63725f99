"""What processes tell each other."""
class RoutesChanged(msgspec.Struct, frozen=True, tag="routes"):
    version: int
class KeysChanged(msgspec.Struct, frozen=True, tag="keys"):
    """Cached principals are void."""
class CancelRequest(msgspec.Struct, frozen=True, tag="cancel"):
    """tenant: whose request; another tenant's is left alone."""
    tenant: str
    request_id: str
Announcement = RoutesChanged | KeysChanged | CancelRequest
class Announcements:
    def __init__(self, live: LiveState) -> None: ...
    def subscribe(self, kind: type[A], handler: Callable[[A], Awaitable[None]]) -> None: ...
    async def publish(self, announcement: Announcement) -> None:
        """Handlers of this process run before it returns; others hear it through Redis. Never raises for a lost Redis."""
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
