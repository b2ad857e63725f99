"""Rate windows and concurrency leases per tenant."""
class RateLimits:
    def __init__(self, live: LiveState, *, clock: Clock = system_clock) -> None: ...
    def admit(self, tenant: TenantView, *, prompt_tokens: int) -> AbstractAsyncContextManager[Admission]:
        """Counts one request and its prompt tokens and holds one of the tenant's concurrent requests until the block ends. Raises RateLimited (retry_after), QuotaExceeded."""
class Admission:
    async def charge(self, completion_tokens: int) -> None: ...
