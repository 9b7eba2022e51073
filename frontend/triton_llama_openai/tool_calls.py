"""Finds tool calls in generated text.

Two forms. Llama 3 writes nothing but calls, separated by `;`, and `parameters`:

    {"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": ...}

Hermes, and with it Qwen and others, marks each call and may write text around it:

    I add them. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

A call is held back until it is complete. Text that is no call, because its JSON is broken or no tool has its name,
stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

Form = Literal["hermes", "llama3_json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;,[]"
_KEYS = {"name", "type", "id", "arguments", "parameters"}
"""Keys of a call; an object with others is ordinary JSON."""

_CUT_OFF = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(.+)', re.DOTALL)
"""A call whose arguments the end of the text cuts off."""


@dataclass(frozen=True)
class ToolCall:
    """One complete call. index: from 0 in each answer. arguments: JSON."""

    index: int
    id: str
    name: str
    arguments: str


Part = str | ToolCall
"""A part of an answer: text, or a call."""


class TextReader(Protocol):
    """Turns one choice's generated text into parts of the answer."""

    def read(self, text: str) -> list[Part]:
        """Return the parts that are certain after this text."""

    def end(self) -> list[Part]:
        """Return the rest; the text is complete."""


class PlainText:
    """All text is content."""

    def read(self, text: str) -> list[Part]:
        """Return the text."""
        return [text] if text else []

    def end(self) -> list[Part]:
        """Return nothing: nothing is held back."""
        return []


class NamedCall:
    """All text is the arguments of one call: the guide is the function's schema."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._text = ""

    def read(self, text: str) -> list[Part]:
        """Hold the text back."""
        self._text += text
        return []

    def end(self) -> list[Part]:
        """Return the call."""
        return [_call(0, self._name, self._text)] if self._text else []


class ToolCallReader:
    """Finds the calls in one choice's text. single: calls after the first are left out."""

    def __init__(self, form: Form, names: Collection[str], single: bool = False) -> None:
        self._form = form
        self._names = frozenset(names)
        self._single = single
        self._held = ""
        """Text that may belong to a call."""
        self._call: _CallText | None = None
        self._calls = 0
        self._in_content = False
        """Whether the text since the last call, or since the beginning, is content."""

    def read(self, text: str) -> list[Part]:
        """Return the parts that are certain after this text."""
        self._held += text
        return [part for part in self._parts() if part]

    def end(self) -> list[Part]:
        """Return the rest: a call that the end cuts off, or the text of an unfinished beginning."""
        call, self._call = self._call, None
        if call is not None and (cut := _CUT_OFF.match(call.json)) and cut[1] in self._names:
            return self._counted(cut[1], cut[2])
        text = (call.text if call is not None else "") + self._held
        between_calls = self._calls and (not text.strip(_SEPARATORS) or CLOSE.startswith(text.strip()))
        return [text] if text and not between_calls else []

    def _parts(self) -> Iterator[Part]:
        while self._held:
            before = self._held, self._call
            if self._call is not None:
                yield from self._read_call(self._call)
            elif self._form == "hermes":
                yield from self._read_hermes()
            else:
                yield from self._read_llama()
            if (self._held, self._call) == before:
                return

    def _read_hermes(self) -> Iterator[Part]:
        if not self._in_content:
            # Blanks before a call, and the end of the call before, are no content.
            rest = self._held.lstrip()
            if self._calls and rest.startswith(CLOSE):
                self._held = rest[len(CLOSE) :]
                return
            if OPEN.startswith(rest) or (self._calls and CLOSE.startswith(rest)):
                return
            if self._calls or rest.startswith(OPEN):
                self._held = rest
        content, opened, rest = self._held.partition(OPEN)
        if opened:
            self._call, self._held = _CallText(OPEN), rest
        else:
            partial_tag = _partial_end(content, OPEN)
            content, self._held = content[: len(content) - partial_tag], content[len(content) - partial_tag :]
            self._in_content = True
        yield content

    def _read_llama(self) -> Iterator[Part]:
        rest = self._held.lstrip(_SEPARATORS)
        if not self._in_content:
            if PYTHON_TAG.startswith(rest):
                return
            if rest.startswith(PYTHON_TAG):
                self._held = rest[len(PYTHON_TAG) :]
                return
            if rest.startswith("{"):
                separators = self._held[: len(self._held) - len(rest)]
                self._call, self._held = _CallText("" if self._calls else separators), rest
                return
        self._in_content = True
        yield self._held
        self._held = ""

    def _read_call(self, call: _CallText) -> Iterator[Part]:
        self._held = call.read(self._held)
        if not call.ended:
            return
        self._call = None
        function = _parse_call(call.json, self._names)
        self._in_content = function is None
        if function is None:
            yield call.text
        else:
            yield from self._counted(*function)

    def _counted(self, name: str, arguments: str) -> list[Part]:
        self._calls += 1
        return [] if self._single and self._calls > 1 else [_call(self._calls - 1, name, arguments)]


class _CallText:
    """The text of one JSON object while it arrives. prefix: the text before it that belongs to the call."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.json = ""
        self.ended = False

    @property
    def text(self) -> str:
        """All of it, to be content if it turns out to be no call."""
        return self._prefix + self.json

    def read(self, text: str) -> str:
        """Take the text up to the object's end, or up to a beginning that is no object's; return the rest."""
        for position, character in enumerate(text):
            self._take(character)
            if self.ended:
                self.json += text[: position + 1]
                return text[position + 1 :]
        self.json += text
        return ""

    def _take(self, character: str) -> None:
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        self.ended = self._depth <= 0 and not character.isspace()


def _parse_call(text: str, names: Collection[str]) -> tuple[str, str] | None:
    """Return a call's name and its arguments as JSON; None for text that is no call of these functions."""
    try:
        call = json.loads(text, strict=False)
        if not isinstance(call, dict) or not call.keys() <= _KEYS:
            return None
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters")) or {}
        if not isinstance(name, str) or name not in names:
            return None
        # Some models write the arguments' JSON as a string.
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return name, arguments


def _call(index: int, name: str, arguments: str) -> ToolCall:
    return ToolCall(index, f"call_{secrets.token_hex(12)}", name, arguments)


def _partial_end(text: str, word: str) -> int:
    """Return how many of the last characters may be the beginning of a word."""
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-size:])), 0)
