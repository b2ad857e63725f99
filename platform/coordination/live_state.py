"""The shared live state: a Redis server, or one inside this process."""
class LiveState:
    def __init__(self, url: str | None = None) -> None:
        """url None: embedded."""
    @property
    def degraded(self) -> bool:
        """The Redis server is away; limits are counted per process."""
    @property
    def outages(self) -> int: ...
    async def close(self) -> None: ...
