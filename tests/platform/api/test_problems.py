"""Every error of every layer below has its public answer, and none tells what it should not."""

import inspect
from types import ModuleType

import msgspec
import pytest
from litestar.exceptions import MethodNotAllowedException, NotFoundException, ValidationException

from polyloom.adapters import errors as adapter_errors
from polyloom.platform import errors as platform_errors
from polyloom.platform.api.disconnect import ClientGone
from polyloom.platform.api.problems import STATUS_BY_CODE, problem_of
from polyloom.platform.api.schemas import ChatRequest, CompletionRequest
from polyloom.platform.engine import errors as engine_errors
from polyloom.platform.engine.messages import Finished, Timings
from polyloom.platform.generation.refusals import of_end, of_engine
from polyloom.routing import errors as routing_errors

STATUSES = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "invalid_schema": 400,
    "invalid_api_key": 401,
    "insufficient_scope": 403,
    "model_not_found": 404,
    "no_default_revision": 404,
    "revision_retired": 404,
    "not_found": 404,
    "conflict": 409,
    "too_large": 413,
    "invalid_adapter": 422,
    "fidelity_failed": 422,
    "gate_failed": 422,
    "rate_limited": 429,
    "quota_exceeded": 429,
    "queue_full": 429,
    "engine_unavailable": 503,
    "database_unavailable": 503,
    "deadline_exceeded": 504,
}


def leaves(module: ModuleType, root: type[Exception]) -> list[type[Exception]]:
    classes = [c for _, c in inspect.getmembers(module, inspect.isclass) if issubclass(c, root)]
    return [c for c in classes if not c.__subclasses__()]


def test_the_contract_s_codes_have_their_statuses() -> None:
    assert STATUSES.items() <= STATUS_BY_CODE.items()


@pytest.mark.parametrize("kind", leaves(platform_errors, platform_errors.PlatformError))
def test_the_shell_s_errors(kind: type[platform_errors.PlatformError]) -> None:
    problem = problem_of(kind("what is wrong", param="field", retry_after=7.2))
    assert problem.status == STATUSES[kind.code]
    assert (problem.body.error.code, problem.body.error.param) == (kind.code, "field")
    assert problem.body.error.message == "what is wrong"
    assert problem.headers["retry-after"] == "8"


@pytest.mark.parametrize("kind", leaves(routing_errors, routing_errors.RoutingError))
def test_the_resolver_s_errors(kind: type[routing_errors.RoutingError]) -> None:
    problem = problem_of(kind("the-model", "there is none"))
    assert (problem.status, problem.code, problem.param) == (404, kind.code, "model")


def test_the_adapters_errors() -> None:
    invalid = problem_of(adapter_errors.InvalidAdapterError("adapter_config.json", "is missing"))
    assert (invalid.status, invalid.param) == (422, "adapter_config.json")
    too_large = problem_of(adapter_errors.TooLargeError("upload", 5, "over 5 bytes"))
    assert (too_large.status, too_large.code) == (413, "too_large")
    corrupt = problem_of(adapter_errors.CorruptAdapterError("sha256:x", "/secret/path"))
    assert corrupt.status == 500
    assert "/secret" not in corrupt.message


@pytest.mark.parametrize("kind", leaves(engine_errors, engine_errors.EngineError))
def test_the_engine_s_errors_are_the_shell_s_before_they_get_here(
    kind: type[engine_errors.EngineError],
) -> None:
    arguments: dict[type, tuple[object, ...]] = {
        engine_errors.EngineRefusedError: ("queue_full", "full", 2.0),
        engine_errors.SlowReaderError: ("s", 5),
    }
    problem = problem_of(of_engine(kind(*arguments.get(kind, ("broken",)))))
    assert problem.code in {"queue_full", "engine_unavailable", "deadline_exceeded"}


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("invalid_adapter", 404),
        ("context_length_exceeded", 400),
        ("invalid_request", 400),
        ("engine_unavailable", 503),
        ("never heard of", 503),
        (None, 503),
    ],
)
def test_a_sequence_that_ended_in_an_error(code: str | None, status: int) -> None:
    timings = Timings(queued=0.0, first_token=None, finished=0.0)
    event = Finished("s", "error", 1, 0, timings, error_code=code, error=None)
    assert problem_of(of_end(event)).status == status


def test_an_unknown_error_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    problem = problem_of(RuntimeError("password is hunter2"))
    assert (problem.status, problem.code) == (500, "internal_error")
    assert "hunter2" not in problem.message
    assert "hunter2" in caplog.text


def test_a_client_that_left_is_nobody_s_fault(caplog: pytest.LogCaptureFixture) -> None:
    assert problem_of(ClientGone("the client left")).status == 499
    assert caplog.text == ""


def test_the_framework_s_errors() -> None:
    unknown = problem_of(NotFoundException())
    assert (unknown.code, unknown.message) == ("not_found", "there is no such endpoint here")
    assert problem_of(MethodNotAllowedException()).status == 405
    assert problem_of(ValidationException("bad query")).code == "invalid_request"


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (ChatRequest, b'{"model": "m", "messages": [], "temprature": 1}', "temprature"),
        (ChatRequest, b'{"messages": []}', "model"),
        (ChatRequest, b'{"model": "m", "messages": [{"role": "x"}]}', "messages[0].role"),
        (ChatRequest, b'{"model": "m", "messages": [{"role": "user", "a": 1}]}', "messages[0].a"),
        (CompletionRequest, b'{"model": "m", "prompt": 5}', "prompt"),
        (CompletionRequest, b'{"model": "m", "prompt": "x", "n": "2"}', "n"),
    ],
)
def test_a_wrong_field_is_named(kind: type[msgspec.Struct], body: bytes, param: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.json.decode(body, type=kind)
    problem = problem_of(refused.value)
    assert (problem.status, problem.param) == (400, param)


def test_a_body_that_is_not_json() -> None:
    with pytest.raises(msgspec.DecodeError) as refused:
        msgspec.json.decode(b"{", type=ChatRequest)
    assert problem_of(refused.value).code == "invalid_request"
