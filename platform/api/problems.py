"""The one place where an exception becomes an HTTP answer: OpenAI's shape, a stable code."""

import logging
import math
import re
from dataclasses import dataclass, replace

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException

from polyloom.adapters.errors import AdapterError, InvalidAdapterError, TooLargeError
from polyloom.platform import errors
from polyloom.platform.api.disconnect import ClientGone
from polyloom.platform.api.schemas import ErrorAnswer, ErrorBody
from polyloom.routing.errors import RoutingError

logger = logging.getLogger(__name__)

STATUS_BY_CODE = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "invalid_schema": 400,
    "invalid_api_key": 401,
    "insufficient_scope": 403,
    "model_not_found": 404,
    "no_default_revision": 404,
    "revision_retired": 404,
    "not_found": 404,
    "method_not_allowed": 405,
    "conflict": 409,
    "too_large": 413,
    "invalid_adapter": 422,
    "fidelity_failed": 422,
    "gate_failed": 422,
    "rate_limited": 429,
    "quota_exceeded": 429,
    "queue_full": 429,
    "client_gone": 499,
    "internal_error": 500,
    "engine_unavailable": 503,
    "database_unavailable": 503,
    "deadline_exceeded": 504,
}
_TYPE_BY_STATUS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODE_BY_STATUS = {404: "not_found", 405: "method_not_allowed", 413: "too_large"}
_RETRY_AFTER = {429: 1.0, 503: 1.0}
_AT_FIELD = re.compile(r" - at `\$\.?(?P<path>.+)`$")
_UNKNOWN_FIELD = re.compile(r"unknown field `(?P<field>[^`]+)`")
_MISSING_FIELD = re.compile(r"missing required field `(?P<field>[^`]+)`")


@dataclass(frozen=True)
class Problem:
    """An error as the client sees it."""

    code: str
    message: str
    param: str | None = None
    retry_after: float | None = None

    @property
    def status(self) -> int:
        return STATUS_BY_CODE[self.code]

    @property
    def body(self) -> ErrorAnswer:
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPE_BY_STATUS.get(self.status, default)
        return ErrorAnswer(ErrorBody(self.message, kind, self.param, self.code))

    @property
    def headers(self) -> dict[str, str]:
        seconds = self.retry_after
        if seconds is None:
            seconds = _RETRY_AFTER.get(self.status)
        out = {} if seconds is None else {"retry-after": str(max(1, math.ceil(seconds)))}
        if self.status == 409:  # the same request would meet the same state
            out["x-should-retry"] = "false"
        return out


def problem_of(error: BaseException) -> Problem:
    """What the client is told. What is nobody's known fault is logged and told as 500 alone."""
    if isinstance(error, errors.PlatformError):
        return Problem(error.code, error.message, error.param, error.retry_after)
    if isinstance(error, RoutingError):
        return Problem(error.code, error.message, "model")
    if isinstance(error, InvalidAdapterError):
        return Problem("invalid_adapter", str(error), error.param)
    if isinstance(error, TooLargeError):
        return Problem("too_large", str(error), error.param)
    if isinstance(error, msgspec.ValidationError):
        return _validation_problem(str(error))
    if isinstance(error, msgspec.DecodeError):
        return Problem("invalid_request", f"the body is not JSON: {error}")
    if isinstance(error, ClientGone):
        return Problem("client_gone", str(error))
    if isinstance(error, HTTPException):
        return _http_problem(error)
    logger.error("unexpected error", exc_info=error)
    if isinstance(error, AdapterError):
        return Problem("internal_error", "the adapter's stored files could not be used")
    return Problem("internal_error", "something broke here; the request's id is in the log")


def _validation_problem(text: str) -> Problem:
    """msgspec names the place as `$.a.b`; an unknown or missing field belongs to that place."""
    at = _AT_FIELD.search(text)
    path = at["path"] if at else None
    message = text[: at.start()] if at else text
    for pattern in (_UNKNOWN_FIELD, _MISSING_FIELD):
        if (match := pattern.search(message)) is not None:
            path = f"{path}.{match['field']}" if path else match["field"]
    problem = Problem("invalid_request", message, path)
    return replace(problem, message=f"{path}: {message}") if path else problem


def _http_problem(error: HTTPException) -> Problem:
    code = _CODE_BY_STATUS.get(error.status_code)
    if code is not None:
        unknown = code == "not_found"
        return Problem(code, "there is no such endpoint here" if unknown else error.detail)
    if error.status_code < 500:
        return Problem("invalid_request", error.detail)
    logger.error("unexpected HTTP error", exc_info=error)
    return Problem("internal_error", "something broke here; the request's id is in the log")


def answer_problem(request: Request, error: Exception) -> Response[ErrorAnswer]:  # type: ignore[type-arg]
    """Litestar's exception handler for everything."""
    problem = problem_of(error)
    return Response(
        problem.body,
        status_code=problem.status,
        headers=problem.headers,
        media_type="application/json",
    )
