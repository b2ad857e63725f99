"""What the record's columns hold. Drivers fail on a value beyond it instead of finding nothing."""

from datetime import UTC, datetime

from polyloom.platform.errors import InvalidRequest

LARGEST_NUMBER = 2**31 - 1
LARGEST_ID = 2**63 - 1
LONGEST_TEXT = 1_000


def check_number(param: str, value: int | None, largest: int = LARGEST_NUMBER) -> None:
    """Raises InvalidRequest unless `value` is None or 0 to `largest`."""
    if value is not None and not 0 <= value <= largest:
        raise InvalidRequest(f"{param} is not between 0 and {largest}", param=param)


def check_moment(param: str, value: datetime | None) -> None:
    """Raises InvalidRequest for a time without a time zone, which would mean another one to each
    reader, or beyond the years that UTC counts."""
    if value is None:
        return
    if value.tzinfo is None:
        raise InvalidRequest(f"{param} has no time zone", param=param)
    try:
        value.astimezone(UTC)
    except OverflowError:
        raise InvalidRequest(f"{param} is out of range", param=param) from None


def check_text(param: str, value: str | None) -> None:
    """Raises InvalidRequest for more than LONGEST_TEXT characters, or a NUL, which PostgreSQL's
    texts cannot hold."""
    if value is None:
        return
    if len(value) > LONGEST_TEXT:
        raise InvalidRequest(f"{param} has more than {LONGEST_TEXT} characters", param=param)
    if "\0" in value:
        raise InvalidRequest(f"{param} holds a NUL character", param=param)
