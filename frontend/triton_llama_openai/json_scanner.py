"""Reads one JSON object that arrives in pieces, and hands out its values' text as it comes.

For tool calls: `{"name": "f", "parameters": {"a": [1, 2]}}` gives the name once it is complete, and the parameters'
JSON piece by piece. It finds where values begin and end; what is between is the model's text, unchanged.
"""

from __future__ import annotations

import json
from enum import Enum, auto


class State(Enum):
    """What comes next in the object."""

    START = auto()
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    COMMA_OR_END = auto()
    DONE = auto()
    BROKEN = auto()


_BLANK = " \t\r\n"


class ObjectScanner:
    """One object. `feed` takes text and returns how much of it belongs to the object.

    values: each key's JSON so far. current: the key whose value is being read.
    """

    def __init__(self) -> None:
        self.state = State.START
        self.values: dict[str, str] = {}
        self.current: str | None = None
        self._token: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def complete(self) -> bool:
        """Whether the object has ended."""
        return self.state is State.DONE

    @property
    def broken(self) -> bool:
        """Whether the text is no JSON object."""
        return self.state is State.BROKEN

    def feed(self, text: str) -> int:
        """Read characters up to the object's end or its first fault; return their number."""
        for position, character in enumerate(text):
            if self.state is State.VALUE and self._token:
                self._in_value(character)
            elif self.state is State.KEY and self._token:
                self._in_key(character)
            elif character not in _BLANK:
                self._between(character)
            if self.state in (State.DONE, State.BROKEN):
                self._flush()
                return position + 1
        self._flush()
        return len(text)

    def _between(self, character: str) -> None:
        match self.state, character:
            case State.START, "{":
                self.state = State.KEY_OR_END
            case State.KEY_OR_END | State.COMMA_OR_END, "}":
                self.state = State.DONE
            case State.KEY_OR_END | State.KEY, '"':
                self.state = State.KEY
                self._token = ['"']
            case State.COLON, ":":
                self.state = State.VALUE
            case State.VALUE, _ if character not in "}],:":
                self._begin_value(character)
            case State.COMMA_OR_END, ",":
                self.state = State.KEY
            case _:
                self.state = State.BROKEN

    def _in_key(self, character: str) -> None:
        self._token.append(character)
        if self._closes(character):
            self._end_key()

    def _closes(self, character: str) -> bool:
        """Take a character of a string; return whether it is the closing quote."""
        closes = character == '"' and not self._escaped
        self._escaped = character == "\\" and not self._escaped
        return closes

    def _end_key(self) -> None:
        try:
            self.current = json.loads("".join(self._token))
        except ValueError:
            self.state = State.BROKEN
            return
        self._token = []
        self.state = State.COLON

    def _begin_value(self, character: str) -> None:
        self._token = [character]
        self._in_string = character == '"'
        self._depth = int(character in "{[")

    def _in_value(self, character: str) -> None:
        if self._in_string:
            self._token.append(character)
            if self._closes(character):
                self._in_string = False
                if not self._depth:
                    self._end_value()
        elif self._depth:
            self._token.append(character)
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            if not self._depth:
                self._end_value()
        elif character in ",}" or character in _BLANK:
            # The end of a number or a word, which have no closing character.
            self._end_value()
            if character not in _BLANK:
                self._between(character)
        else:
            self._token.append(character)

    def _end_value(self) -> None:
        self._flush()
        self._token = []
        self.current = None
        self.state = State.COMMA_OR_END

    def _flush(self) -> None:
        """Move what has been read of a value to `values`; a marker stays, for the value goes on."""
        if self.state is State.VALUE and self._token and self.current is not None:
            self.values[self.current] = self.values.get(self.current, "") + "".join(self._token)
            self._token = [""]
