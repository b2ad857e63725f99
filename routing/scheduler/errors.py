"""Why a sequence is not taken into the queue.

SchedulerError
├── QueueFullError          the waiting queue is at its limit; try again later
├── NeverFitsError          prompt and answer exceed the context or the whole cache
└── DuplicateSequenceError  the id is already in use
"""


class SchedulerError(Exception):
    """Root of everything the scheduler refuses on purpose."""


class QueueFullError(SchedulerError):
    """As many sequences wait as may wait."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the queue is full: {limit} sequences are waiting")
        self.limit = limit


class NeverFitsError(SchedulerError):
    """The sequence could not run even alone."""

    def __init__(self, prompt_tokens: int, max_tokens: int, limit: int) -> None:
        super().__init__(
            f"{prompt_tokens} prompt tokens and {max_tokens} to generate exceed the limit of "
            f"{limit} tokens"
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.limit = limit


class DuplicateSequenceError(SchedulerError):
    """A sequence with this id is in the engine already."""

    def __init__(self, sequence_id: str) -> None:
        super().__init__(f"sequence {sequence_id!r} exists already")
        self.sequence_id = sequence_id
