"""Reads one call, a JSON object, a character at a time."""

import json
from dataclasses import dataclass
from enum import Enum

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
_CLOSERS = {"{": "}", "[": "]"}
_SCALAR = frozenset("-+.0123456789eEtrufalsn")


class MalformedCall(Exception):
    """It is no JSON object with a name."""


@dataclass(frozen=True)
class Found:
    """What a character made certain. name: of the function.  arguments: their next part."""

    name: str | None = None
    arguments: str = ""


_NOTHING = Found()


class _At(Enum):
    START = 1
    KEY = 2
    COLON = 3
    VALUE = 4
    COMMA = 5
    END = 6


class CallScanner:
    """Feed it from the opening brace on, until `complete`."""

    def __init__(self) -> None:
        self._at = _At.START
        self._key: str | None = None
        self._value = _Value()
        self.named = False  # its function is known
        self._has_arguments = False
        self._waiting = ""  # arguments that came before the name
        self._may_end = False  # an object may be empty, but has nothing after a comma

    @property
    def complete(self) -> bool:
        """The closing brace was read."""
        return self._at is _At.END

    def feed(self, character: str) -> Found:
        """Raises MalformedCall; nothing more is to be fed then."""
        if self._at is _At.VALUE:
            return self._feed_value(character)
        if self._at is _At.KEY and self._value.begun:
            return self._feed_key(character)
        if character in " \t\r\n":
            return _NOTHING
        if self._at is _At.START and character == "{":
            self._at, self._may_end = _At.KEY, True
        elif self._at is _At.KEY and character == '"':
            self._value.feed(character)
        elif self._at is _At.COLON and character == ":":
            self._at, self._value = _At.VALUE, _Value()
        elif self._at is _At.COMMA and character == ",":
            self._at, self._value, self._may_end = _At.KEY, _Value(), False
        elif character == "}" and (self._at is _At.COMMA or self._may_end):
            return self._end()
        else:
            raise MalformedCall
        return _NOTHING

    def _feed_key(self, character: str) -> Found:
        self._value.feed(character)
        if self._value.complete:
            self._key, self._at = self._value.string(), _At.COLON
        return _NOTHING

    def _feed_value(self, character: str) -> Found:
        value = self._value
        taken = value.feed(character)
        found = self._found(character if taken else "")
        if value.complete:
            self._at = _At.COMMA
            if not taken:  # it ended a number or a word, and is the object's own
                found = Found(found.name, found.arguments + self.feed(character).arguments)
        return found

    def _found(self, character: str) -> Found:
        value = self._value
        if self._key in NAME_KEYS and not self.named:
            if not value.complete:
                return _NOTHING
            return self._name(value.string())
        if self._key in ARGUMENT_KEYS and (not self._has_arguments or value.is_arguments):
            self._has_arguments = value.is_arguments = True
            return self._arguments(character)
        return _NOTHING

    def _name(self, name: str) -> Found:
        if not name:
            raise MalformedCall
        self.named = True
        waiting, self._waiting = self._waiting, ""
        return Found(name, waiting)

    def _arguments(self, character: str) -> Found:
        """An object is passed on as it comes; a text that holds one, when it is whole."""
        value = self._value
        if value.is_container:
            text = character
        elif not value.complete:
            return _NOTHING
        elif value.text.startswith('"'):
            text = value.string()
        else:
            text = "{}" if value.text == "null" else value.text
        if self.named:
            return Found(arguments=text)
        self._waiting += text
        return _NOTHING

    def _end(self) -> Found:
        if not self.named:
            raise MalformedCall
        self._at = _At.END
        return _NOTHING if self._has_arguments else Found(arguments="{}")


class _Value:
    """One JSON value; keeps the text of strings and scalars, and the brackets of the others."""

    def __init__(self) -> None:
        self.text = ""
        self.complete = False
        self.is_container = False
        self.is_arguments = False
        self._closers: list[str] = []
        self._in_string = self._escaped = False

    @property
    def begun(self) -> bool:
        return self.is_container or bool(self.text)

    def feed(self, character: str) -> bool:
        """Whether the character is part of the value."""
        if not self.begun:
            return self._begin(character)
        if self._in_string:
            self._feed_string(character)
        elif self.is_container:
            self._feed_container(character)
        elif character in _SCALAR:
            self.text += character
        else:
            self.complete = True
            return False
        return True

    def string(self) -> str:
        """The text that it stands for. Raises MalformedCall where it is none."""
        try:
            value = json.loads(self.text, strict=False)
        except ValueError:
            raise MalformedCall from None
        if not isinstance(value, str):
            raise MalformedCall
        return value

    def _begin(self, character: str) -> bool:
        if character in " \t\r\n":
            return False
        if character in _CLOSERS:
            self.is_container = True
            self._closers.append(_CLOSERS[character])
            return True
        self._in_string = character == '"'
        if not self._in_string and character not in _SCALAR:
            raise MalformedCall
        self.text = character
        return True

    def _feed_string(self, character: str) -> None:
        if not self.is_container:
            self.text += character
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            self.complete = not self.is_container

    def _feed_container(self, character: str) -> None:
        if character == '"':
            self._in_string = True
        elif character in _CLOSERS:
            self._closers.append(_CLOSERS[character])
        elif character in "}]":
            if character != self._closers.pop():
                raise MalformedCall
            self.complete = not self._closers
