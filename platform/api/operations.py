"""What machines ask: is it alive, does it generate, its metrics, its document."""

import math

import msgspec
from litestar import Response, delete, get
from litestar.di import NamedDependency
from litestar.params import FromPath

from polyloom.platform.api.guards import AuthorizedRequest, requires, tenant_of
from polyloom.platform.engine.fleet import EngineFleet
from polyloom.platform.engine.pool import EnginePool
from polyloom.platform.engine.supervisor import EngineState
from polyloom.platform.generation.inference import Inference
from polyloom.platform.telemetry.metrics import Metrics


class Health(msgspec.Struct, frozen=True):
    """status: `ok`, `degraded` (some engines serve, some do not), `draining`, or what the engine's
    process is doing instead of serving.
    heartbeat_age: seconds since its step loop was last heard; null if it is not connected."""

    status: str
    heartbeat_age: float | None


@get("/livez")
async def live() -> Response[str]:
    """This process answers."""
    return Response("ok", media_type="text/plain")


@get("/health")
async def health(
    engine: NamedDependency[EnginePool], fleet: NamedDependency[EngineFleet]
) -> Response[Health]:
    """200 when generation works: the engine answers only after a probe generation of its own, and
    its step loop sends the heartbeats. 503 otherwise."""
    last = engine.last_status
    if not engine.healthy:
        hung = fleet.state is EngineState.READY
        status = "no_heartbeat" if hung else fleet.state.value
    elif engine.degraded:
        status = "degraded"
    else:
        status = "draining" if last is not None and last.draining else "ok"
    age = engine.status_age if math.isfinite(engine.status_age) else None
    code = 200 if status in ("ok", "degraded") else 503
    return Response(Health(status, age), status_code=code, media_type="application/json")


@get("/metrics", include_in_schema=False)
async def metrics(metrics: NamedDependency[Metrics]) -> Response[bytes]:
    """Prometheus scrape."""
    return Response(metrics.scrape(), media_type=metrics.content_type)


@delete("/v1/requests/{request_id:str}", guards=[requires("inference")])
async def cancel_request(
    request: AuthorizedRequest, inference: NamedDependency[Inference], request_id: FromPath[str]
) -> None:
    """End a running request of this tenant by its `x-request-id`, wherever it runs. Its answer ends
    with finish reason `cancelled`. An id that runs nowhere is no error."""
    await inference.cancel(tenant_of(request.auth), request_id)


OPERATION_ROUTES = [live, health, metrics, cancel_request]
