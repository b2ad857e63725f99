"""Where the shell's code takes the time from, so that tests can move it."""

import time
from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], float]
"""Unix time in seconds."""

system_clock: Clock = time.time


def utc(clock: Clock) -> datetime:
    """The clock's time as an aware datetime in UTC."""
    return datetime.fromtimestamp(clock(), UTC)
