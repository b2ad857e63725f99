"""Quality bars as lines: `name: figure (bar) ok`, `FALLS SHORT` or `not measured`; last a count."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """One bar; ok is None where this machine cannot measure it."""

    name: str
    figure: str
    bar: str
    ok: bool | None

    def __str__(self) -> str:
        verdict = {True: "ok", False: "FALLS SHORT", None: "not measured"}[self.ok]
        return f"{self.name}: {self.figure} ({self.bar}) {verdict}"


def show_bars(bars: Iterable[Bar]) -> int:
    """Print each bar as it is measured, then the count; the exit status, 1 if one falls short."""
    verdicts = []
    for bar in bars:
        print(bar, flush=True)
        verdicts.append(bar.ok)
    unknown = verdicts.count(None)
    left_out = f", {unknown} not measured" if unknown else ""
    print(f"{verdicts.count(True)} of {len(verdicts)} bars met{left_out}")
    return 1 if False in verdicts else 0
