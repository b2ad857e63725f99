"""What can go wrong in the shell, each with the public code of the API's error object.

    PlatformError
    ├── InvalidRequest           invalid_request
    │   ├── ContextLengthExceeded  context_length_exceeded
    │   └── InvalidSchema          invalid_schema
    ├── InvalidApiKey            invalid_api_key
    ├── InsufficientScope        insufficient_scope
    ├── NotFound                 not_found
    ├── Conflict                 conflict
    ├── TooLarge                 too_large
    ├── FidelityFailed           fidelity_failed
    ├── GateFailed               gate_failed
    ├── LimitExceeded
    │   ├── RateLimited            rate_limited
    │   ├── QuotaExceeded          quota_exceeded
    │   └── QueueFull              queue_full
    ├── Unavailable
    │   ├── EngineUnavailable      engine_unavailable
    │   └── DatabaseUnavailable    database_unavailable
    └── DeadlineExceeded         deadline_exceeded

The trees of the packages below (`polyloom.adapters.errors`, `polyloom.routing.errors`) keep their
own; HTTP statuses are known to `platform.api` alone.
"""

from typing import ClassVar


class PlatformError(Exception):
    """Base of the shell's errors.

    message: for the caller; never holds secrets, paths of the server or another tenant's names.
    param: the field, file or parameter at fault.
    retry_after: seconds after which the same request may succeed.
    """

    code: ClassVar[str]

    def __init__(
        self, message: str, *, param: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class InvalidRequest(PlatformError):
    """A parameter or body that cannot be served as written."""

    code = "invalid_request"


class ContextLengthExceeded(InvalidRequest):
    """Prompt and requested tokens are over the model's context."""

    code = "context_length_exceeded"


class InvalidSchema(InvalidRequest):
    """A JSON schema, regular expression or grammar that cannot constrain decoding."""

    code = "invalid_schema"


class InvalidApiKey(PlatformError):
    """No key, an unknown, expired or revoked one, or a disabled tenant's."""

    code = "invalid_api_key"


class InsufficientScope(PlatformError):
    """The key is valid but lacks the scope named in the message."""

    code = "insufficient_scope"


class NotFound(PlatformError):
    """No such thing, or another tenant's: the two are not told apart."""

    code = "not_found"


class Conflict(PlatformError):
    """The thing's present state forbids the change."""

    code = "conflict"


class TooLarge(PlatformError):
    """A body over its limit."""

    code = "too_large"


class FidelityFailed(PlatformError):
    """The engine's logits differ from PEFT's by more than the bound."""

    code = "fidelity_failed"


class GateFailed(PlatformError):
    """A candidate did not answer a golden prompt as expected; `param` is the prompt's name."""

    code = "gate_failed"


class LimitExceeded(PlatformError):
    """Refused now, by a limit."""


class RateLimited(LimitExceeded):
    """The tenant's requests or tokens of the last minute, or its concurrent requests."""

    code = "rate_limited"


class QuotaExceeded(LimitExceeded):
    """A limit that time alone does not lift: adapters, storage, one request's size."""

    code = "quota_exceeded"


class QueueFull(LimitExceeded):
    """The engine's queue takes no more."""

    code = "queue_full"


class Unavailable(PlatformError):
    """A part of the server is away."""


class EngineUnavailable(Unavailable):
    """The engine process is lost, starting or draining."""

    code = "engine_unavailable"


class DatabaseUnavailable(Unavailable):
    """The database does not answer."""

    code = "database_unavailable"


class DeadlineExceeded(PlatformError):
    """The request's deadline passed."""

    code = "deadline_exceeded"
