"""`GET /v1/usage`: a tenant's own usage."""

from datetime import datetime
from typing import Literal

from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromQuery

from polyloom.platform.api.admin import UsageTotals
from polyloom.platform.api.guards import AuthorizedRequest, requires, tenant_of
from polyloom.platform.services.usage import UsageFilter, UsageService


@get("/v1/usage", guards=[requires("usage:read")])
async def own_usage(
    request: AuthorizedRequest,
    usage: NamedDependency[UsageService],
    adapter: FromQuery[str | None] = None,
    revision: FromQuery[int | None] = None,
    since: FromQuery[datetime | None] = None,
    until: FromQuery[datetime | None] = None,
    group_by: FromQuery[list[Literal["adapter", "revision"]] | None] = None,
) -> UsageTotals:
    """Sums of this tenant's usage, filtered and grouped."""
    totals = await usage.totals(
        UsageFilter(
            tenant_id=tenant_of(request.auth).id,
            adapter=adapter,
            revision=revision,
            since=since,
            until=until,
        ),
        group_by=group_by or (),
    )
    return UsageTotals(totals)
