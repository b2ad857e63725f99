"""What completions and chat share: who asks, the answer's headers, usage."""

from dataclasses import replace

from polyloom.platform.api.guards import AuthorizedRequest, tenant_of
from polyloom.platform.api.schemas import (
    CompletionTokensDetails,
    PromptTokensDetails,
    StreamOptions,
    Usage,
)
from polyloom.platform.errors import InvalidRequest
from polyloom.platform.generation.inference import Inference, InferenceCall, Target
from polyloom.platform.generation.request_plan import (
    SamplingOptions,
    plan_domain,
    plan_drafts,
    plan_salt,
)

STREAM_GRACE_SECONDS = 30.0
"""Beyond the request's deadline, for a reader that is a little slow."""


SESSION_HEADER = "x-polyloom-session"


async def resolve_target(
    request: AuthorizedRequest, inference: Inference, options: SamplingOptions, endpoint: str
) -> Target:
    """The model that this request's tenant means. Requests of one session (the header, else the
    body's `user`) stay on one target of a route."""
    target = await inference.target(
        tenant_of(request.auth),
        request.auth.key_id,
        options.model,
        endpoint,
        session=request.headers.get(SESSION_HEADER) or options.user,
        salt=plan_salt(options),
    )
    request.state.request_id = target.request_id
    return replace(target, drafts=plan_drafts(options, target.drafts), domain=plan_domain(options))


def answer_headers(call: InferenceCall) -> dict[str, str]:
    """Which revision answers, by which version of all routing state, and of the route if it was
    called through one."""
    resolution = call.target.resolution
    headers = {
        "x-polyloom-revision": resolution.label,
        "x-polyloom-route-version": str(resolution.route_version),
    }
    if resolution.route is not None:
        headers["x-polyloom-route"] = resolution.route
    return headers


def usage_of(call: InferenceCall) -> Usage:
    """Usage of a call that has ended."""
    totals = call.run.totals
    return Usage(
        totals.prompt_tokens,
        totals.completion_tokens,
        totals.prompt_tokens + totals.completion_tokens,
        PromptTokensDetails(totals.cached_tokens),
        CompletionTokensDetails(totals.accepted_tokens, totals.rejected_tokens),
    )


def wants_usage(stream: bool | None, options: StreamOptions | None) -> bool:
    """Whether a stream ends with a usage chunk. Raises InvalidRequest for options of no stream."""
    if options is not None and not stream:
        raise InvalidRequest("only with stream=true", param="stream_options")
    return options is not None and bool(options.include_usage)
