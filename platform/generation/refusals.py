"""The engine's refusals and failures as the errors that the API answers with."""

from polyloom.platform.engine.errors import (
    EngineError,
    EngineRefusedError,
    EngineUnavailableError,
    SlowReaderError,
)
from polyloom.platform.engine.messages import Finished
from polyloom.platform.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineUnavailable,
    InvalidRequest,
    InvalidSchema,
    PlatformError,
    QueueFull,
)
from polyloom.routing.errors import ModelNotFound, RoutingError

RequestError = PlatformError | RoutingError

_BY_CODE: dict[str, type[PlatformError]] = {
    error.code: error
    for error in (
        ContextLengthExceeded,
        DeadlineExceeded,
        EngineUnavailable,
        InvalidRequest,
        InvalidSchema,
        QueueFull,
    )
}


def of_engine(error: EngineError) -> RequestError:
    """What the engine's client raised, for the caller of the API."""
    if isinstance(error, EngineRefusedError):
        return _of_code(error.code, str(error), error.retry_after)
    if isinstance(error, EngineUnavailableError):
        return EngineUnavailable(str(error), retry_after=error.retry_after)
    if isinstance(error, SlowReaderError):
        return DeadlineExceeded("the stream was read too slowly and has been ended")
    return EngineUnavailable(str(error))


def of_end(event: Finished) -> RequestError:
    """A sequence that ended with reason `error` or `deadline`."""
    if event.reason == "deadline":
        return DeadlineExceeded("the request's deadline passed")
    return _of_code(event.error_code or EngineUnavailable.code, event.error or "", None)


def _of_code(code: str, message: str, retry_after: float | None) -> RequestError:
    """`invalid_adapter` means that the files of a revision that had been ready turned out unusable:
    for its caller the revision is gone. An unknown code is the engine's fault."""
    if code == "invalid_adapter":
        return ModelNotFound("", "this revision is out of service: its files cannot be used")
    kind = _BY_CODE.get(code, EngineUnavailable)
    return kind(message or "the engine could not finish this request", retry_after=retry_after)
