"""Tools of a chat: tools in the prompt, guides that force calls, and the calls in the model's text.

A forced call is JSON that the guide demands. Free text has calls in one of two forms. Llama 3 writes nothing but calls,
separated by `;`, and `parameters`:

    {"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": ...}

Hermes, and with it Qwen and others, marks each call and may write text around it:

    I add them. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

Hermes' calls are held back until they are complete, Llama's until the text is. Text that is no call, because its JSON
is broken or no tool has its name, stays text. A call is sent whole; `chat` writes it into messages and deltas.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from triton_llama_openai.errors import ApiError, invalid
from triton_llama_openai.output.structured_output import Guide, guide_fields, guide_of, json_guide
from triton_llama_openai.protocol.chat import ChatRequest
from triton_llama_openai.protocol.messages import NamedToolChoice, Tool
from triton_llama_openai.protocol.schema import JsonObject

if TYPE_CHECKING:
    from triton_llama_openai.prompt.chat_template import Turn

Form = Literal["hermes", "llama3_json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
_SEPARATORS = " \t\r\n;,[]"
_KEYS = {"name", "type", "id", "arguments", "parameters"}
"""Keys of a call; an object with others is ordinary JSON."""

_ON_ONE_LINE: JsonObject = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""Calls as json.dumps writes them, which templates show the models; free whitespace is where small models stay."""

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

    Cut off, it is nothing: what parses may be the beginning of a longer number, and calls go together.
    """

    def __init__(self, name: str | None = None) -> None:
        self._name = name
        self._text = ""

    def read(self, text: str) -> list[str | ToolCall]:
        """Hold the text back."""
        self._text += text
        return []

    def end(self, *, cut: bool = False) -> list[str | ToolCall]:
        """Return the calls."""
        if cut:
            return []
        try:
            value = json.loads(self._text)
        except (ValueError, RecursionError):
            return []
        if self._name is not None:
            return [ToolCall(0, _new_id(), self._name, self._text)]
        return [
            ToolCall(index, _new_id(), call["name"], json.dumps(call["parameters"], ensure_ascii=False))
            for index, call in enumerate(value)
        ]


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


class LlamaReader(_CallReader):
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


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools.

    template_tools: definitions for the template. guide: of the text, from response_format or a forced call.
    call_reader: makes the reader of one choice's calls, None without tools. finish_reason: of a choice with calls;
    OpenAI's is `stop` for a named one. ignored: fields without effect, because a forced call is the guide.
    """

    template_tools: list[Turn]
    guide: Guide | None
    call_reader: Callable[[], CallReader] | None = None
    finish_reason: str = "tool_calls"
    ignored: Sequence[str] = ()


def tool_use(request: ChatRequest, form: Form) -> ToolUse:
    """Return how a request uses its tools. Raises ApiError if tools, tool_choice and guides don't agree."""
    tools = request.tools or []
    choice = request.tool_choice or ("auto" if tools else "none")
    if choice == "none":
        return ToolUse([], guide_of(request))
    if not tools:
        raise ApiError(400, "tool_choice is given without tools", "tool_choice", "invalid_value")
    template_tools = [template_tool(tool) for tool in tools]
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", names, "a list of functions with different names")
    single = request.parallel_tool_calls is False
    if choice == "auto":
        reader = HermesReader if form == "hermes" else LlamaReader
        return ToolUse(template_tools, guide_of(request), partial(reader, names, single))
    # A forced call wins, as under vLLM.
    ignored = guide_fields(request)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            field = request.client_field("tool_choice.function.name")
            raise invalid(field, name, f"one of the tools: {', '.join(names)}")
        guide = json_guide("tools", _ON_ONE_LINE | _parameters(tools[names.index(name)]))
        return ToolUse(template_tools, guide, partial(ForcedCalls, name), "stop", ignored)
    guide = json_guide("tools", _ON_ONE_LINE | _calls_schema(tools, single))
    return ToolUse(template_tools, guide, ForcedCalls, ignored=ignored)


def template_tool(tool: Tool) -> Turn:
    """Return a tool as templates read it, without the fields that it doesn't have."""
    definition = vars(tool.function)
    function = {name: value for name, value in definition.items() if value is not None and name != "cache_control"}
    return {"type": "function", "function": function}


def _calls_schema(tools: Sequence[Tool], single: bool) -> JsonObject:
    """Return the JSON schema of an array of calls of these tools. single: of one call at most.

    The tools' `$defs` and `definitions` are merged at the root, so that references such as `#/$defs/x` still resolve.
    Raises ApiError if two tools define a name differently.
    """
    definitions: dict[str, JsonObject] = {}
    calls = []
    for tool in tools:
        parameters = dict(_parameters(tool))
        for key in ("$defs", "definitions"):
            schemas = parameters.pop(key, None)
            if isinstance(schemas, dict):
                _merge(definitions.setdefault(key, {}), schemas, key)
        properties = {"name": {"const": tool.function.name}, "parameters": parameters}
        call = {"type": "object", "properties": properties, "required": ["name", "parameters"]}
        calls.append({**call, "additionalProperties": False})
    bound = {"maxItems": 1} if single else {}
    return {"type": "array", "minItems": 1, **bound, "items": {"anyOf": calls}, **definitions}


def _merge(definitions: JsonObject, schemas: JsonObject, key: str) -> None:
    for name, schema in schemas.items():
        if definitions.setdefault(name, schema) != schema:
            raise invalid("tools", f"{key}/{name}", "defined the same way in every tool's parameters")


def _parameters(tool: Tool) -> JsonObject:
    return tool.function.parameters or {"type": "object", "properties": {}}
