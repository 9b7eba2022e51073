"""The tools of a request: what the template shows, what the model is made to write, and what reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from triton_llama_openai.chat_template import Turn
from triton_llama_openai.errors import ApiError, invalid
from triton_llama_openai.protocol import ChatRequest, JsonObject, NamedToolChoice, Tool
from triton_llama_openai.structured_output import Guide, guide_of, json_guide
from triton_llama_openai.tool_calls import Form, HermesReader, LlamaReader, NamedCall, PlainText, TextReader

_ON_ONE_LINE: JsonObject = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
"""Calls as json.dumps writes them, which templates show the models; free whitespace is where small models stay."""


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools.

    template_tools: definitions for the template. guide: of the text, from response_format or a forced call. reader:
    makes the reader of one choice's text. finish_reason: of a choice with calls; OpenAI's is `stop` for a named one.
    """

    template_tools: list[Turn]
    guide: Guide | None
    reader: Callable[[], TextReader]
    finish_reason: str = "tool_calls"


def tool_use(request: ChatRequest, form: Form) -> ToolUse:
    """Return how a request uses its tools. Raises ApiError for a choice that its tools don't offer."""
    tools = request.tools or []
    choice = request.tool_choice or ("auto" if tools else "none")
    guide = guide_of(request)
    if choice == "none":
        return ToolUse([], guide, PlainText)
    if not tools:
        raise ApiError(400, "tool_choice is given without tools", "tool_choice", "invalid_value")
    template_tools = [template_tool(tool) for tool in tools]
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", names, "a list of functions with different names")
    single = request.parallel_tool_calls is False
    if choice == "auto":
        reader = HermesReader if form == "hermes" else LlamaReader
        return ToolUse(template_tools, guide, partial(reader, names, single))
    if guide is not None:
        message = f"{guide.field} and a forced tool_choice are both given; it must be one of them"
        raise ApiError(400, message, guide.field, "invalid_value")
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            raise invalid("tool_choice.function.name", name, f"one of the tools: {', '.join(names)}")
        guide = json_guide("tools", _ON_ONE_LINE | _parameters(tools[names.index(name)]))
        return ToolUse(template_tools, guide, partial(NamedCall, name), "stop")
    # The array of calls that the guide demands is Llama's form between brackets.
    guide = json_guide("tools", _ON_ONE_LINE | _calls_schema(tools, single))
    return ToolUse(template_tools, guide, partial(LlamaReader, names, single))


def template_tool(tool: Tool) -> Turn:
    """Return a tool as templates read it, without the fields that it doesn't have."""
    function = {name: value for name, value in vars(tool.function).items() if value is not None}
    return {"type": "function", "function": function}


def _calls_schema(tools: Sequence[Tool], single: bool) -> JsonObject:
    """Return the schema of a list of calls; the parameters' shared definitions move to its root, where $ref looks."""
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
