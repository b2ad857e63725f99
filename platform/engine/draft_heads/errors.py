"""Errors of draft heads beside those of their files (`adapters.errors`)."""

from polyloom.platform.engine.errors import EngineError


class TrainingError(EngineError):
    """A head could not be trained: the message says what is wrong with the job."""
