"""Quality bars as lines: `name: figure (bar) ok` or `FALLS SHORT`, and a count at the end."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """One measured bar."""

    name: str
    figure: str
    bar: str
    ok: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.figure} ({self.bar}) {'ok' if self.ok else 'FALLS SHORT'}"


def show_bars(bars: Iterable[Bar]) -> int:
    """Print each bar as it is measured, then the count; the exit status, 1 if one falls short."""
    met = []
    for bar in bars:
        print(bar, flush=True)
        met.append(bar.ok)
    print(f"{sum(met)} of {len(met)} bars met")
    return 0 if all(met) else 1
