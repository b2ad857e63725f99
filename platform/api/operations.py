"""What machines ask: is it alive, does it generate, its metrics, its document."""

from typing import Literal

import msgspec
from litestar import Response, delete, get

from polyloom.platform.api.guards import AuthorizedRequest, requires, tenant_of
from polyloom.platform.engine.client import EngineClient
from polyloom.platform.generation.inference import Inference
from polyloom.platform.telemetry.metrics import Metrics


class Health(msgspec.Struct, frozen=True):
    """heartbeat_age: seconds since the engine's step loop was last heard; null before the first."""

    status: Literal["ok", "starting", "engine_unavailable", "draining"]
    heartbeat_age: float | None


@get("/livez")
async def live() -> Response[str]:
    """This process answers."""
    return Response("ok", media_type="text/plain")


@get("/health")
async def health(engine: EngineClient) -> Response[Health]:
    """200 when generation works: the engine answers only after a probe generation of its own, and
    its step loop sends the heartbeats. 503 otherwise."""
    status = engine.last_status
    state: Literal["ok", "starting", "engine_unavailable", "draining"] = "ok"
    if engine.welcome is None:
        state = "starting"
    elif not engine.healthy:
        state = "engine_unavailable"
    elif status is not None and status.draining:
        state = "draining"
    age = engine.status_age if engine.status_age != float("inf") else None
    return Response(
        Health(state, age), status_code=200 if state == "ok" else 503, media_type="application/json"
    )


@get("/metrics", include_in_schema=False)
async def metrics(metrics: Metrics) -> Response[bytes]:
    """Prometheus scrape."""
    return Response(metrics.scrape(), media_type=metrics.content_type)


@delete("/v1/requests/{request_id:str}", guards=[requires("inference")])
async def cancel_request(request: AuthorizedRequest, inference: Inference, request_id: str) -> None:
    """End a running request of this tenant by its `x-request-id`, wherever it runs. Its answer ends
    with finish reason `cancelled`. An id that runs nowhere is no error."""
    await inference.cancel(tenant_of(request.auth), request_id)


OPERATION_ROUTES = [live, health, metrics, cancel_request]
