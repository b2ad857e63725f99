"""Errors of the engine, on both sides of its socket.

EngineError
├── SamplingError           logits from which no token can be chosen; ends one sequence
│   └── GrammarError          a grammar that cannot be compiled, or goes over its limits
├── EngineStartError        the engine process cannot start: settings, model, memory, self-test
├── IntegrityError          idle, yet blocks or pins are held: a leak
├── EngineUnavailableError  the engine is not there, or was lost while the sequence ran
├── EngineRefusedError      the engine did not take a sequence, and says why
└── SlowReaderError         the reader of a stream stayed too far behind; the sequence was ended
"""


class EngineError(Exception):
    """Root of everything the engine raises on purpose."""


class SamplingError(EngineError):
    """No token can be chosen from these logits."""


class GrammarError(SamplingError):
    """A grammar does not say which token may follow; the message is for who wrote the grammar."""


class EngineStartError(EngineError):
    """The engine cannot start; the message names the setting or the step that failed."""


class IntegrityError(EngineError):
    """Something is held although nothing runs."""


class EngineUnavailableError(EngineError):
    """No answer can come: the engine is down, or went down. Retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float = 2.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineRefusedError(EngineError):
    """The sequence was not queued; `code` is one of the public error codes."""

    def __init__(self, code: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class SlowReaderError(EngineError):
    """A stream's reader left more than the limit unread; its sequence was ended."""

    def __init__(self, sequence_id: str, limit: int) -> None:
        super().__init__(f"sequence {sequence_id!r}: more than {limit} tokens unread")
