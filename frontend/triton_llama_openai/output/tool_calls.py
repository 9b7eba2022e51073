"""The calls of tools in the model's text.

A forced call is JSON that the guide demands. Free text has calls in one of two forms. Llama 3 writes nothing but calls,
separated by `;`, and `parameters`:

    {"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": ...}

Hermes, and with it Qwen and others, marks each call and may write text around it:

    I add them. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

Hermes' calls are held back until they are complete, Llama's until the text is. Text that is no call, because its JSON
is broken or no tool has its name, stays text. A call is sent whole; the modules of `routes` write it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from triton_llama_openai.settings import ToolForm

if TYPE_CHECKING:
    from triton_llama_openai.prompt.chat_template import ChatTemplate

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;,[]"
_KEYS = {"name", "type", "id", "arguments", "parameters"}
"""Keys of a call; an object with others is ordinary JSON."""

_decode = json.JSONDecoder(strict=False).raw_decode


@dataclass(frozen=True)
class ToolCall:
    """One call. index: from 0 in each answer. arguments: JSON."""

    index: int
    id: str
    name: str
    arguments: str


class CallReader(Protocol):
    """Finds the calls in one choice's text after its reasoning."""

    def read(self, text: str) -> list[str | ToolCall]:
        """Return the texts and calls that are certain after this text."""

    def end(self, *, cut: bool = False) -> list[str | ToolCall]:
        """Return the rest; no text follows. cut: max_tokens has ended it."""


class ForcedCalls:
    """All text, but for reasoning before it, is JSON: the arguments of one call, or without a name a list of calls.

    A call that is cut off is nothing. A call that repeats an earlier one ends the list: the model might go on for ever.
    """

    def __init__(self, name: str | None = None) -> None:
        self.ended = False
        self._name = name
        self._text = ""
        """Text after the last call."""
        self._calls: list[tuple[str, str]] = []
        """Names and arguments."""

    def read(self, text: str) -> list[str | ToolCall]:
        """Return the calls that this text completes."""
        self._text += text
        calls: list[str | ToolCall] = []
        while "}" in text and not self.ended and (call := self._next()):
            self.ended = call in self._calls
            if not self.ended:
                calls.append(ToolCall(len(self._calls), _new_id(), *call))
                self._calls.append(call)
        return calls

    def end(self, *, cut: bool = False) -> list[str | ToolCall]:
        """Return a named function's call whose arguments are no object: only the end tells that they are complete."""
        if cut or self._name is None or self._calls:
            return []
        try:
            json.loads(self._text)
        except (ValueError, RecursionError):
            return []
        return [ToolCall(0, _new_id(), self._name, self._text)]

    def _next(self) -> tuple[str, str] | None:
        """Remove the next complete call of the text; return its name and arguments."""
        text = self._text.lstrip(_SEPARATORS)
        if not text.startswith("{"):
            return None
        try:
            value, length = _decode(text)
        except (ValueError, RecursionError):
            return None
        self._text = text[length:]
        if self._name is not None:
            return self._name, text[:length]
        return value["name"], json.dumps(value["parameters"], ensure_ascii=False)


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

    def _call(self, call: _Call) -> list[str | ToolCall]:
        self._count += 1
        self._in_content = False
        if self._single and self._count > 1:
            return []
        return [ToolCall(self._count - 1, _new_id(), call.name, call.arguments)]


class HermesReader(_CallReader):
    """Finds the calls between tags."""

    def read(self, text: str) -> list[str | ToolCall]:
        """Return the text outside of calls, and each call that is complete."""
        self._held += text
        parts: list[str | ToolCall] = []
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
        size = 0 if blank_or_tag else len(self._held) - partial_end(self._held, OPEN)
        content, self._held = self._held[:size], self._held[size:]
        return parts + self._content(content)

    def end(self, *, cut: bool = False) -> list[str | ToolCall]:
        """Return the rest: a call without its end tag, or text."""
        if self._held.startswith(OPEN):
            body = self._held.removeprefix(OPEN).lstrip()
            if call := _parse(body, self._names):
                rest = body[call.length :].strip()
                return self._call(call) + ([] if CLOSE.startswith(rest) else self._content(rest))
        return self._content(self._held)

    def _content(self, text: str) -> list[str | ToolCall]:
        if self._count and not self._in_content:
            text = text.lstrip()
        self._in_content = self._in_content or bool(text)
        return [text] if text else []


class Llama3Reader(_CallReader):
    """Finds the calls of a text that is nothing else."""

    def read(self, text: str) -> list[str | ToolCall]:
        """Return text that doesn't begin as a call; hold back any other."""
        self._held += text
        begin = self._held.lstrip(_SEPARATORS)
        if not self._in_content and (PYTHON_TAG.startswith(begin) or begin.startswith(("{", PYTHON_TAG))):
            return []
        self._in_content = True
        content, self._held = self._held, ""
        return [content] if content else []

    def end(self, *, cut: bool = False) -> list[str | ToolCall]:
        """Return the calls, and the text after them."""
        parts: list[str | ToolCall] = []
        while rest := self._held.lstrip(_SEPARATORS).removeprefix(PYTHON_TAG).lstrip():
            call = _parse(rest, self._names)
            if call is None:
                return [*parts, rest if self._count else self._held]
            parts += self._call(call)
            self._held = rest[call.length :]
        return parts if self._count or not self._held else [self._held]


READERS: Mapping[ToolForm, type[HermesReader | Llama3Reader]] = {"hermes": HermesReader, "llama3_json": Llama3Reader}


def tool_form(template: ChatTemplate | None) -> ToolForm:
    """Return the form of a model's calls. template: for tools; without a hint Hermes, as in the system message."""
    if template is None or not template.takes_tools or OPEN in template.source:
        return "hermes"
    return "llama3_json"


@dataclass(frozen=True)
class _Call:
    """A call in a text. length: of its JSON."""

    name: str
    arguments: str
    length: int


def _parse(text: str, names: Collection[str]) -> _Call | None:
    """Return the call at the beginning of a text, None for any other text."""
    try:
        call, length = _decode(text)
        if not isinstance(call, dict) or not call.keys() <= _KEYS:
            return None
        arguments = call.get("arguments", call.get("parameters")) or {}
        # Some models write the arguments' JSON as a string.
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    name = call.get("name")
    return _Call(name, arguments, length) if isinstance(name, str) and name in names else None


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def partial_end(text: str, word: str) -> int:
    """Return the length of the text's longest ending that begins the word, shorter than the word itself."""
    return next((size for size in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-size:])), 0)
