"""What a step costs with more rows in it: measured on this machine, with this model."""

import math
from bisect import bisect_left
from functools import cache

_EXACT = 16  # row counts up to here are told apart; above, by powers of 2^(1/4)
_LEVEL_RATE = 0.2  # how fast the machine's present speed is followed
_SHAPE_RATE = 0.02  # how fast a row count's own share of it is, at least
_CONTEXT_RATE = 0.02
_LARGEST_SURPRISE = 0.7  # of a log: a step held up for longer says nothing about its rows
_FIRST_SLOPE = 0.01  # of the cost, per row, where nothing larger was measured


class StepTimes:
    """Seconds of a step by its rows: `exp(level + shape[rows]) + slope * attended`.

    The level follows the machine as a whole, and is shared, so that row counts which are rarely run
    stay comparable with those that always are when something else takes the processor.
    attended: summed over the rows, the tokens that each looks back at.
    """

    def __init__(self) -> None:
        self._level = 0.0
        self._rows: list[int] = []  # measured classes, ascending
        self._shape: dict[int, float] = {}
        self._count: dict[int, int] = {}
        self._slope = 0.0
        self._attended: dict[int, float] = {}

    @property
    def known(self) -> bool:
        """Anything was measured."""
        return bool(self._rows)

    @property
    def classes(self) -> int:
        """How many classes of row counts were measured."""
        return len(self._rows)

    def knows(self, rows: int) -> bool:
        """A step of about so many rows was measured."""
        return _class(rows) in self._shape

    def measured(self, rows: int, attended: float, seconds: float) -> None:
        """A step of `rows` took `seconds`, more than 0."""
        at = _class(rows)
        if at not in self._shape:
            self._begin(at, rows, attended, seconds)
            return
        predicted = self.predict(rows, attended)
        surprise = math.log(max(seconds, 1e-9) / predicted)
        surprise = max(-_LARGEST_SURPRISE, min(_LARGEST_SURPRISE, surprise))
        self._count[at] += 1
        self._level += _LEVEL_RATE * surprise
        self._shape[at] += max(_SHAPE_RATE, 1.0 / self._count[at]) * surprise
        deviation = attended - self._attended[at]
        self._attended[at] += _CONTEXT_RATE * deviation
        if deviation:
            gradient = surprise * predicted * deviation / (deviation * deviation + 1e3)
            self._slope = max(0.0, self._slope + _CONTEXT_RATE * gradient)

    def predict(self, rows: int, attended: float) -> float:
        """Seconds of such a step; 0 before anything was measured."""
        [seconds] = self.predict_each(range(rows, rows + 1), attended / rows)
        return seconds

    def predict_each(self, rows: range, attended: float) -> list[float]:
        """The same of steps with so many rows, of which each looks back at `attended` tokens."""
        if not self._rows:
            return [0.0] * len(rows)
        predicted, known = list[float](), 0
        base = mean_attended = 0.0
        for count in rows:
            if (at := _class(count)) != known:
                known = at
                shape, mean_attended = self._at(count)
                base = math.exp(self._level + shape)
            extra = self._slope * (attended * count - mean_attended)
            predicted.append(max(base + extra, 0.5 * base))
        return predicted

    def _begin(self, at: int, rows: int, attended: float, seconds: float) -> None:
        if self._rows:
            predicted = self.predict(rows, attended)
            surprise = math.log(max(seconds, 1e-9) / predicted)
            surprise = max(-_LARGEST_SURPRISE, min(_LARGEST_SURPRISE, surprise))
            shape = math.log(predicted) - self._level + surprise
        else:
            self._level = shape = 0.5 * math.log(max(seconds, 1e-9))
        self._rows.insert(bisect_left(self._rows, at), at)
        self._shape[at], self._count[at], self._attended[at] = shape, 1, attended

    def _at(self, rows: int) -> tuple[float, float]:
        """Shape and mean attended tokens for `rows`, between the nearest measured classes."""
        at = _class(rows)
        if at in self._shape:
            return self._shape[at], self._attended[at]
        place = bisect_left(self._rows, at)
        if place == 0:
            nearest = self._rows[0]
            return self._shape[nearest], self._attended[nearest]
        low = self._rows[place - 1]
        if place == len(self._rows):
            grown = _FIRST_SLOPE * (_size(at) - _size(low))
            return self._shape[low] + grown, self._attended[low] * _size(at) / _size(low)
        high = self._rows[place]
        share = (_size(at) - _size(low)) / (_size(high) - _size(low))
        return (
            (1 - share) * self._shape[low] + share * self._shape[high],
            (1 - share) * self._attended[low] + share * self._attended[high],
        )


@cache
def _class(rows: int) -> int:
    if rows <= _EXACT:
        return rows
    return _EXACT + math.ceil(4 * math.log2(rows / _EXACT) - 1e-9)


def _size(at: int) -> float:
    """Rows of a class."""
    return at if at <= _EXACT else float(_EXACT * 2.0 ** ((at - _EXACT) / 4))
