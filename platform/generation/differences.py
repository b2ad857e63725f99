"""What kind of text two prompts differ in, by the look of it.

Prompts that were meant to be alike mostly differ in something that a program wrote: a time, an id, a
secret. A pattern must cover the first difference in both texts to be named; else it is plain text.
"""

import math
import re
from collections import Counter
from typing import Literal

import msgspec

DifferenceKind = Literal["timestamp", "secret", "id", "number", "text"]

WINDOW = 160
"""Characters before and after the first difference that are looked at."""
SHOWN = 60
MIN_RANDOM_LENGTH = 16
MIN_ENTROPY = 3.0
"""Bits a character; English words have less at this length, hex and base64 more."""

_DATE = (
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}"
    r"|(?:\d{1,2}(?:st|nd|rd|th)? )?\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May"
    r"|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b"
    r"(?: \d{1,2}(?:st|nd|rd|th)?)?,?(?: \d{4})?"
)
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp][Mm])?(?:Z| ?[+-]\d{2}:?\d{2}| UTC)?"
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_TIMESTAMP = re.compile(
    rf"(?:{_DAY},? )?(?:{_DATE})(?:(?:T|,? )(?:at )?{_CLOCK})?|{_CLOCK}|\b{_DAY}\b"
    r"|(?<![\w.])1\d{9}(?:\.\d+|\d{3}|\d{6})?(?!\w|\.\d)"
)
_SECRET = re.compile(
    r"(?:sk|pk|rk|pl|xox[abp]|gh[opsu]|glpat|hf|npm)[-_][A-Za-z0-9_\-]{6,}|AKIA[A-Z0-9]{8,}"
    r"|eyJ[\w\-]+(?:\.[\w\-]+)*|(?i:bearer\s+|(?:password|passwd|secret|token|api[_ -]?key)"
    r"""["']?\s*[:=]\s*["']?)[^\s"',;]{4,}"""
)
_UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_WORD = re.compile(r"[A-Za-z0-9+/=_\-]+")
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*")


class TextDifference(msgspec.Struct, frozen=True):
    """Where two texts part. first, second: what stands there, from a little before it."""

    kind: DifferenceKind
    first: str
    second: str


def text_difference(first: str, second: str) -> TextDifference | None:
    """The first difference of two texts; None if they are equal."""
    if first == second:
        return None
    at = common_length(first, second)
    start = max(0, at - WINDOW)
    one, other = first[start : at + WINDOW], second[start : at + WINDOW]
    kinds = [_kinds(text, at - start) for text in (one, other)]
    alike: list[DifferenceKind] = [kind for kind in kinds[0] if kind in kinds[1]]
    kind = alike[0] if alike else "text"
    shown = max(0, at - start - SHOWN)
    end = at - start + SHOWN
    return TextDifference(kind, one[shown:end], other[shown:end])


def common_length(first: str, second: str) -> int:
    """Characters that two texts begin with alike."""
    shorter = min(len(first), len(second))
    return next((i for i in range(shorter) if first[i] != second[i]), shorter)


def _kinds(text: str, at: int) -> list[DifferenceKind]:
    """What the text at `at` may be, the more telling first."""
    found: list[DifferenceKind] = []
    if _covers(_SECRET, text, at):
        found.append("secret")
    if _covers(_UUID, text, at):
        found.append("id")
    if _covers(_TIMESTAMP, text, at):
        found.append("timestamp")
    if any(_looks_random(m[0]) for m in _WORD.finditer(text) if m.start() <= at < m.end()):
        found.append("id")
    if _covers(_NUMBER, text, at):
        found.append("number")
    return found


def _covers(pattern: re.Pattern[str], text: str, at: int) -> bool:
    return any(match.start() <= at < match.end() for match in pattern.finditer(text))


def _looks_random(word: str) -> bool:
    """Long, with digits among its letters, and its characters spread."""
    if len(word) < MIN_RANDOM_LENGTH or word.isalpha():
        return False
    counts = Counter(word.lower()).values()
    entropy = -sum(n / len(word) * math.log2(n / len(word)) for n in counts)
    return entropy >= MIN_ENTROPY
