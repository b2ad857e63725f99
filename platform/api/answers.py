"""What completions and chat share: who asks, the answer's headers, usage."""

from polyloom.platform.api.guards import AuthorizedRequest, tenant_of
from polyloom.platform.api.schemas import PromptTokensDetails, StreamOptions, Usage
from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.inference import Inference, InferenceCall, Target

STREAM_GRACE_SECONDS = 30.0
"""Beyond the request's deadline, for a reader that is a little slow."""


async def resolve_target(
    request: AuthorizedRequest, inference: Inference, model: str, endpoint: str
) -> Target:
    """The model that this request's tenant means."""
    target = await inference.target(tenant_of(request.auth), request.auth.key_id, model, endpoint)
    request.state.request_id = target.request_id
    return target


def answer_headers(call: InferenceCall) -> dict[str, str]:
    """Which revision answers, by which version of the routes."""
    resolution = call.target.resolution
    return {
        "x-polyloom-revision": resolution.label,
        "x-polyloom-route-version": str(resolution.route_version),
    }


def usage_of(call: InferenceCall) -> Usage:
    """Usage of a call that has ended."""
    totals = call.run.totals
    return Usage(
        totals.prompt_tokens,
        totals.completion_tokens,
        totals.prompt_tokens + totals.completion_tokens,
        PromptTokensDetails(totals.cached_tokens),
    )


def wants_usage(stream: bool | None, options: StreamOptions | None) -> bool:
    """Whether a stream ends with a usage chunk. Raises InvalidRequest for options of no stream."""
    if options is not None and not stream:
        raise InvalidRequest("only with stream=true", param="stream_options")
    return options is not None and bool(options.include_usage)


def refuse_response_format(kind: str | None) -> None:
    """Only text can be asked for. Raises InvalidRequest naming the field."""
    if kind not in (None, "text"):
        raise InvalidRequest(f"{kind!r} is not supported yet; use text", param="response_format")
