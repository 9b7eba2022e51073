"""Finds tool calls in a text while it is generated, so that a call's arguments stream.

Two forms. Llama 3 writes nothing but calls, separated by `;`, and `parameters`:

    {"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": ...}

Hermes, and with it Qwen and others, marks each call and may write text around it:

    I add them. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

What looks like a call and isn't one, because its JSON is broken or no tool has its name, stays text.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol

from triton_llama_openai.json_scanner import ObjectScanner

Form = Literal["hermes", "llama3_json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "type", "id", *_ARGUMENTS}
"""Keys of a call; another one before the name, and the object is ordinary JSON."""
_SEPARATORS = " \t\r\n;,[]"


@dataclass(frozen=True)
class ContentDelta:
    """Text that is no call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call has begun; index: from 0 for each answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of a call's arguments, in JSON."""

    index: int
    text: str


Part = ContentDelta | CallStart | ArgumentsDelta


class TextReader(Protocol):
    """Turns generated text into parts of the answer."""

    def read(self, text: str) -> list[Part]:
        """Return what is certain after this text."""

    def end(self) -> list[Part]:
        """Return what was held back; the text is complete."""


class PlainText:
    """All text is content."""

    def read(self, text: str) -> list[Part]:
        """Return the text."""
        return [ContentDelta(text)] if text else []

    def end(self) -> list[Part]:
        """Return nothing: nothing is held back."""
        return []


class NamedCall:
    """All text is the arguments of one call: the guide is the function's schema."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def read(self, text: str) -> list[Part]:
        """Return the call's start before its first arguments."""
        parts: list[Part] = [] if self._started or not text else [CallStart(0, new_id(), self._name)]
        self._started = self._started or bool(text)
        return [*parts, ArgumentsDelta(0, text)] if text else parts

    def end(self) -> list[Part]:
        """Return nothing: nothing is held back."""
        return []


class _Call:
    """One call that is being read. text: all of it, to be content if it turns out to be no call."""

    def __init__(self, names: Collection[str], index: int) -> None:
        self._names = names
        self._index = index
        self._scanner = ObjectScanner()
        self._key: str | None = None
        self._sent = 0
        self.started = False
        self.text = ""

    @property
    def complete(self) -> bool:
        return self._scanner.complete

    @property
    def refused(self) -> bool:
        """Whether it is certainly no call."""
        if self.started:
            return False
        return (
            self._scanner.broken
            or self._scanner.complete
            or self._name() == ""
            or not self._scanner.values.keys() <= _KEYS
        )

    @property
    def broken(self) -> bool:
        return self._scanner.broken

    def feed(self, text: str) -> tuple[int, list[Part]]:
        """Read; return how many characters belong to the call, and its new parts."""
        used = self._scanner.feed(text)
        self.text += text[:used]
        parts: list[Part] = []
        name = self._name()
        self._key = self._key or next((key for key in _ARGUMENTS if self._scanner.values.get(key)), None)
        if not self.started and name and self._key is not None:
            self.started = True
            parts.append(CallStart(self._index, new_id(), name))
        if self.started and (more := self._more_arguments()):
            parts.append(ArgumentsDelta(self._index, more))
        if self._scanner.complete and not self.started and name:
            # A function without parameters.
            self.started = True
            parts += [CallStart(self._index, new_id(), name), ArgumentsDelta(self._index, "{}")]
        return used, parts

    def _name(self) -> str | None:
        """Return the tool's name, "" if no tool has it, None as long as it isn't complete."""
        written = self._scanner.values.get("name")
        if written is None or self._scanner.current == "name":
            return None
        if not written.startswith('"'):
            # A list or an object may be of any depth.
            return ""
        try:
            name = json.loads(written)
        except ValueError:
            return ""
        return name if name in self._names else ""

    def _more_arguments(self) -> str:
        written = self._scanner.values[self._key] if self._key else ""
        if written.startswith('"'):
            # JSON within a string: its text once it is complete.
            if self._sent or self._scanner.current == self._key:
                return ""
            self._sent = len(written)
            return _string(written)
        more, self._sent = written[self._sent :], len(written)
        return more


class ToolCallReader:
    """Reads one answer's text. only_one: calls after the first are left out, as parallel_tool_calls false asks."""

    def __init__(self, form: Form, names: Collection[str], only_one: bool = False) -> None:
        self._form = form
        self._names = frozenset(names)
        self._only_one = only_one
        self._held = ""
        self._call: _Call | None = None
        self._calls = 0
        self._content = False
        """Whether the text since the last call, or since the beginning, is content."""

    def read(self, text: str) -> list[Part]:
        """Return what is certain after this text."""
        self._held += text
        parts: list[Part] = []
        while self._held:
            before = len(self._held), self._call
            parts += self._in_call() if self._call is not None else self._outside()
            if (len(self._held), self._call) == before:
                break
        return self._joined(parts)

    def end(self) -> list[Part]:
        """Return what was held back; an unfinished beginning of a call is content."""
        call, self._call = self._call, None
        text = call.text if call is not None and not call.started else ""
        text, self._held = text + self._held, ""
        if self._calls and (not text.strip(_SEPARATORS) or CLOSE.startswith(text.strip())):
            # What separates calls, or ends the last one.
            return []
        return [ContentDelta(text)] if text else []

    def _outside(self) -> list[Part]:
        return self._outside_hermes() if self._form == "hermes" else self._outside_llama()

    def _outside_hermes(self) -> list[Part]:
        if not self._content:
            rest = self._held.lstrip()
            if self._calls and rest.startswith(CLOSE):
                self._held = rest[len(CLOSE) :]
                return []
            if OPEN.startswith(rest) or (self._calls and CLOSE.startswith(rest)):
                return []
            if self._calls or rest.startswith(OPEN):
                # Blanks before a call, or after one.
                self._held = rest
        start = self._held.find(OPEN)
        if start >= 0:
            content, self._held = self._held[:start], self._held[start + len(OPEN) :]
            self._begin(OPEN)
            return [ContentDelta(content)] if content else []
        kept = _partial_end(self._held, OPEN)
        content, self._held = self._held[: len(self._held) - kept], self._held[len(self._held) - kept :]
        self._content = True
        return [ContentDelta(content)] if content else []

    def _outside_llama(self) -> list[Part]:
        if self._content:
            content, self._held = self._held, ""
            return [ContentDelta(content)]
        # Only what separates calls may come before a call.
        rest = self._held.lstrip(_SEPARATORS)
        if not rest or PYTHON_TAG.startswith(rest):
            return []
        if rest.startswith(PYTHON_TAG):
            self._held = rest[len(PYTHON_TAG) :]
            return []
        if rest.startswith("{"):
            before, self._held = self._held[: len(self._held) - len(rest)], rest
            self._begin("" if self._calls else before)
            return []
        self._content = True
        content, self._held = self._held, ""
        return [ContentDelta(content)]

    def _begin(self, prefix: str) -> None:
        self._call = _Call(self._names, self._calls)
        self._call.text = prefix

    def _in_call(self) -> list[Part]:
        assert self._call is not None
        call = self._call
        used, parts = call.feed(self._held)
        self._held = self._held[used:]
        if call.refused:
            self._call = None
            self._content = True
            return [ContentDelta(call.text)]
        if call.complete or call.broken:
            self._call = None
            self._calls += 1
            self._content = False
        return parts

    def _joined(self, parts: list[Part]) -> list[Part]:
        """Return the parts with neighbouring texts joined, and without calls that were not asked for."""
        joined: list[Part] = []
        for part in parts:
            if self._only_one and not isinstance(part, ContentDelta) and part.index > 0:
                continue
            last = joined[-1] if joined else None
            if isinstance(part, ContentDelta) and isinstance(last, ContentDelta):
                joined[-1] = ContentDelta(last.text + part.text)
            elif isinstance(part, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == part.index:
                joined[-1] = ArgumentsDelta(part.index, last.text + part.text)
            else:
                joined.append(part)
        return joined


def new_id() -> str:
    """Return an id for a call."""
    return f"call_{secrets.token_hex(12)}"


def _string(written: str) -> str:
    """Return the text of a JSON string; one with a fault as it was written."""
    try:
        return str(json.loads(written, strict=False))
    except ValueError:
        return written


def _partial_end(text: str, word: str) -> int:
    """Return how many of the last characters may be the beginning of a word."""
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-size:])), 0)
