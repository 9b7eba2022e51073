"""Finds tool calls in generated text. Two forms; Llama 3 writes nothing but calls, separated by `;`, and `parameters`:

    {"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": ...}

Hermes, and with it Qwen and others, marks each call and may write text around it:

    I add them. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

Hermes' calls are held back until they are complete, Llama's until the text is. Text that is no call, because its JSON
is broken or no tool has its name, stays text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from pydantic_core import from_json

Form = Literal["hermes", "llama3_json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;,[]"
_KEYS = {"name", "type", "id", "arguments", "parameters"}
"""Keys of a call; an object with others is ordinary JSON."""

_CUT_OFF = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(.+)', re.DOTALL)
"""A call whose arguments the end of the text cuts off."""

_decode = json.JSONDecoder(strict=False).raw_decode


@dataclass(frozen=True)
class ToolCall:
    """One call. index: from 0 in each answer. arguments: JSON, unless the end of the text cuts them off."""

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
        self._arguments = ""

    def read(self, text: str) -> list[Part]:
        """Hold the text back."""
        self._arguments += text
        return []

    def end(self) -> list[Part]:
        """Return the call."""
        return [ToolCall(0, _new_id(), self._name, self._arguments)] if self._arguments else []


class _CallReader:
    """Base of the forms' readers. single: calls after the first are left out."""

    def __init__(self, names: Collection[str], single: bool = False) -> None:
        self._names = frozenset(names)
        self._single = single
        self._count = 0
        self._held = ""
        """Text that may belong to a call."""
        self._in_content = False
        """Whether the text since the last call, or since the beginning, is content."""

    def _call(self, call: _Call) -> list[Part]:
        self._count += 1
        self._in_content = False
        if self._single and self._count > 1:
            return []
        return [ToolCall(self._count - 1, _new_id(), call.name, call.arguments)]


class HermesReader(_CallReader):
    """Finds the calls between tags."""

    def read(self, text: str) -> list[Part]:
        """Return the text outside of calls, and each call that is complete."""
        self._held += text
        parts: list[Part] = []
        while OPEN in self._held:
            content, _, rest = self._held.partition(OPEN)
            if self._in_content or content.strip():
                parts += self._content(content)
            body, closed, rest = rest.partition(CLOSE)
            if not closed:
                self._held = OPEN + body
                return parts
            self._held = rest
            call = _parse(body.strip(), self._names)
            whole = call is not None and call.length == len(body.strip())
            parts += self._call(call) if call and whole else self._content(OPEN + body + CLOSE)
        # Blanks before a call are no content.
        blank_or_tag = OPEN.startswith(self._held.lstrip())
        size = 0 if blank_or_tag else len(self._held) - _partial_end(self._held, OPEN)
        content, self._held = self._held[:size], self._held[size:]
        return parts + self._content(content)

    def end(self) -> list[Part]:
        """Return the rest: a call without its end tag, or text."""
        if self._held.startswith(OPEN):
            body = self._held.removeprefix(OPEN).lstrip()
            if call := _parse(body, self._names, may_be_cut_off=True):
                rest = body[call.length :].strip()
                return self._call(call) + ([] if CLOSE.startswith(rest) else self._content(rest))
        return self._content(self._held)

    def _content(self, text: str) -> list[Part]:
        if self._count and not self._in_content:
            text = text.lstrip()
        self._in_content = self._in_content or bool(text)
        return [text] if text else []


class LlamaReader(_CallReader):
    """Finds the calls of a text that is nothing else."""

    def read(self, text: str) -> list[Part]:
        """Return text that doesn't begin as a call; hold back any other."""
        self._held += text
        begin = self._held.lstrip(_SEPARATORS)
        if not self._in_content and (PYTHON_TAG.startswith(begin) or begin.startswith(("{", PYTHON_TAG))):
            return []
        self._in_content = True
        content, self._held = self._held, ""
        return [content] if content else []

    def end(self) -> list[Part]:
        """Return the calls, and the text after them."""
        parts: list[Part] = []
        while rest := self._held.lstrip(_SEPARATORS).removeprefix(PYTHON_TAG).lstrip():
            call = _parse(rest, self._names, may_be_cut_off=True)
            if call is None:
                return [*parts, rest if self._count else self._held]
            parts += self._call(call)
            self._held = rest[call.length :]
        return parts if self._count or not self._held else [self._held]


@dataclass(frozen=True)
class _Call:
    """A call in a text. length: of its JSON."""

    name: str
    arguments: str
    length: int


def _parse(text: str, names: Collection[str], *, may_be_cut_off: bool = False) -> _Call | None:
    """Return the call at the beginning of a text, None for any other text. may_be_cut_off: the text has ended."""
    try:
        call, length = _decode(text)
        if not isinstance(call, dict) or not call.keys() <= _KEYS:
            return None
        arguments = call.get("arguments", call.get("parameters")) or {}
        # Some models write the arguments' JSON as a string.
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except json.JSONDecodeError:
        return _parse_cut_off(text, names) if may_be_cut_off else None
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    return _Call(name, arguments, length) if isinstance(name, str) and name in names else None


def _parse_cut_off(text: str, names: Collection[str]) -> _Call | None:
    """Return the call that the end of a text cuts off within its arguments, None for any other text."""
    match = _CUT_OFF.fullmatch(text)
    if match is None or match[1] not in names:
        return None
    try:
        from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return None
    return _Call(match[1], match[2], len(text))


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _partial_end(text: str, word: str) -> int:
    """Return how many of the last characters may be the beginning of a word."""
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-size:])), 0)
