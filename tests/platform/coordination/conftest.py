"""A clock that tests move."""

import pytest


class Time:
    """Stands still, 15 s into a minute, until it is moved."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0 // 60 * 60 + 15

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()
