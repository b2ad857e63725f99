"""Tool calls out of a text that arrives in pieces.

The text is read a character at a time, so the events do not depend on how it was cut into pieces.
What only looked like a call is text, as it was written.
"""

from dataclasses import dataclass
from enum import Enum

from polyloom.platform.generation.tools.call_scanner import CallScanner, MalformedCall
from polyloom.platform.generation.tools.formats import ToolFormat

MAX_NAMELESS = 4096
"""Characters after which what began like a call, and has named no function, is text."""
MAX_READINGS = 8
"""Of one text, each from a later beginning, until it is only text."""


@dataclass(frozen=True)
class TextPiece:
    """Text beside the calls."""

    text: str


@dataclass(frozen=True)
class CallBegun:
    """A call's function is known; its arguments follow. index: of the answer's calls."""

    index: int
    name: str


@dataclass(frozen=True)
class ArgumentsPiece:
    """The next part of a call's arguments, which are JSON when all of it is there."""

    index: int
    text: str


ToolEvent = TextPiece | CallBegun | ArgumentsPiece


class _At(Enum):
    TEXT = 1
    MARKS = 2  # between the opening and the closing, outside of any object
    OBJECT = 3


class ToolCallParser:
    """Of one answer. White space beside calls belongs to nobody and is dropped."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._at = _At.TEXT
        self._events: list[ToolEvent] = []
        self._calls = 0
        self._begun = False  # some text or call was there
        self._after_call = False
        self._space = ""
        self._mark = ""  # the part of an opening or closing that is there
        self._raw = ""  # of a call whose function is not known yet
        self._again = ""  # what was given up and is to be read once more
        self._in_list = self._between = False
        self._scanner = CallScanner()

    @property
    def calls(self) -> int:
        """Calls that have begun."""
        return self._calls

    def push(self, text: str) -> list[ToolEvent]:
        """What `text` makes certain."""
        for character in text:
            self._step(character)
            if self._again:
                self._read_again()
        return self._taken()

    def finish(self) -> list[ToolEvent]:
        """The rest, when the answer has ended: a call that broke off stays as far as it came."""
        if self._raw:
            self._give_up()
            self._read_again(ended=True)
        if self._at is _At.TEXT and self._mark:
            self._resume(self._mark)
        elif not self._after_call:
            self._say(self._space)
        self._mark = self._space = ""
        return self._taken()

    def _taken(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return merged(events)

    def _step(self, character: str) -> None:
        if self._at is _At.TEXT:
            self._read_text(character)
        elif self._at is _At.MARKS:
            self._read_marks(character)
        else:
            self._read_object(character)
        if len(self._raw) > MAX_NAMELESS:
            self._resume(self._left())

    def _read_again(self, *, ended: bool = False) -> None:
        """Read what was given up, which may be given up again further on. ended: nothing follows."""
        for _ in range(MAX_READINGS):
            text, self._again = self._again, ""
            for at, character in enumerate(text, start=1):
                self._step(character)
                if self._again:
                    self._again += text[at:]
                    break
            if ended and self._raw and not self._again:
                self._give_up()
            if not self._again:
                return
        self._resume(self._again)
        self._again = ""

    def _read_text(self, character: str) -> None:
        opening = self._form.opening
        if not self._mark and character.isspace():
            self._space += character
            return
        if character == "{" and self._form.bare and not self._begun and not self._mark:
            self._open(self._space)
            self._read_marks(character)
            return
        seen = self._mark + character
        while seen and not opening.startswith(seen):
            self._resume(seen[0])
            seen = seen[1:]
            if seen and seen[0].isspace():
                self._space, seen = seen, ""
        self._mark = seen
        if seen == opening:
            self._mark = ""
            self._open(self._space + opening)

    def _resume(self, text: str) -> None:
        """Text that is no part of a call, with the space before it."""
        self._say(text if self._after_call else self._space + text)
        self._space, self._after_call = "", False

    def _say(self, text: str) -> None:
        if text:
            self._begun = True
            self._events.append(TextPiece(text))

    def _open(self, raw: str) -> None:
        self._at, self._raw, self._space = _At.MARKS, raw, ""
        self._in_list = self._between = False

    def _close(self) -> None:
        self._at, self._raw, self._mark = _At.TEXT, "", ""
        self._begun = self._after_call = True

    def _read_marks(self, character: str) -> None:
        self._raw += character
        if character.isspace() and not self._mark:
            return
        if self._form.closing.startswith(seen := self._mark + character) and not self._in_list:
            self._mark = seen
            if seen == self._form.closing:
                self._close()
        elif self._mark:
            self._give_up()
        elif character == "{" and not self._between:
            self._at, self._scanner = _At.OBJECT, CallScanner()
            self._scanner.feed(character)
        elif character == "[" and not self._in_list and not self._between:
            self._in_list = True
        elif character == "," and self._in_list and self._between:
            self._between = False
        elif character == "]" and self._in_list:
            self._in_list, self._between = False, True
            if not self._form.closing:
                self._close()
        elif character == ";" and self._form.bare and self._between:
            self._between = False
        else:
            self._give_up()

    def _read_object(self, character: str) -> None:
        if not self._scanner.named:
            self._raw += character
        try:
            found = self._scanner.feed(character)
        except MalformedCall:
            if self._scanner.named:
                self._raw = character
            self._give_up()
            return
        if found.name is not None:
            self._events.append(CallBegun(self._calls, found.name))
            self._calls += 1
            self._begun, self._raw = True, ""
        if found.arguments:
            self._events.append(ArgumentsPiece(self._calls - 1, found.arguments))
        if self._scanner.complete:
            self._at, self._raw, self._between = _At.MARKS, "", True

    def _give_up(self) -> None:
        """What was read since the last call began is text after all."""
        written = self._left()
        # Its first character opens no call: it was tried. One may begin further on.
        self._resume(written[:1])
        self._again = written[1:]

    def _left(self) -> str:
        """Be in the text again. Returns what was read since the last call began, the space before
        it aside."""
        written = self._raw.lstrip()
        self._space = self._raw[: len(self._raw) - len(written)]
        self._at, self._raw, self._mark = _At.TEXT, "", ""
        return written


def merged(events: list[ToolEvent]) -> list[ToolEvent]:
    """The same with neighbouring pieces of one text or one call's arguments put together."""
    out: list[ToolEvent] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, TextPiece) and isinstance(last, TextPiece):
            out[-1] = TextPiece(last.text + event.text)
        elif isinstance(event, ArgumentsPiece) and isinstance(last, ArgumentsPiece):
            out[-1] = ArgumentsPiece(last.index, last.text + event.text)
        else:
            out.append(event)
    return out
