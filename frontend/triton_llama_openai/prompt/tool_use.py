"""How a request uses its tools: their definitions for the template, the guide of a forced call, the reader of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from triton_llama_openai.errors import ApiError, invalid
from triton_llama_openai.guides.structured_output import (
    Guide,
    guide_fields,
    guide_of,
    lenient_schema,
    schema_guide,
    strict_schema,
)
from triton_llama_openai.output.tool_calls import READERS, CallReader, ForcedCalls
from triton_llama_openai.protocol.chat import ChatRequest, NamedToolChoice, Tool
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.settings import ToolForm

_ON_ONE_LINE: JsonObject = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Calls as json.dumps writes them, which templates show the models; free whitespace is where small models stay."""


@dataclass(frozen=True)
class ToolUse:
    """How one request uses tools.

    template_tools: definitions for the template. guide: of the text, from response_format or a forced call.
    call_reader: makes the reader of one choice's calls, None without tools. finish_reason: of a choice with calls;
    OpenAI's is `stop` for a named one. ignored: fields without effect, because a forced call is the guide.
    """

    template_tools: list[JsonObject]
    guide: Guide | None
    call_reader: Callable[[], CallReader] | None = None
    finish_reason: str = "tool_calls"
    ignored: Sequence[str] = ()


def tool_use(request: ChatRequest, form: ToolForm) -> ToolUse:
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
        return ToolUse(template_tools, guide_of(request), partial(READERS[form], names, single))
    # A forced call wins, as under vLLM.
    ignored = guide_fields(request)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            field = request.client_field("tool_choice.function.name")
            raise invalid(field, name, f"one of the tools: {', '.join(names)}")
        index = names.index(name)
        parameters, dropped = _parameters(request, index, tools[index])
        parameters["x-guidance"] = _ON_ONE_LINE | _options(parameters)
        guide = schema_guide(_tool_field(request, index), parameters, dropped)
        return ToolUse(template_tools, guide, partial(ForcedCalls, name), "stop", ignored)
    guide = _calls_guide(request, tools, single)
    return ToolUse(template_tools, guide, ForcedCalls, ignored=ignored)


def template_tool(tool: Tool) -> JsonObject:
    """Return a tool as templates read it, without the fields that it doesn't have."""
    definition = vars(tool.function)
    function = {name: value for name, value in definition.items() if value is not None and name != "cache_control"}
    return {"type": "function", "function": function}


def _calls_guide(request: ChatRequest, tools: Sequence[Tool], single: bool) -> Guide:
    """Return the guide of an array of calls of these tools. single: of one call at most.

    The tools' `$defs` and `definitions` are merged at the root, so that references such as `#/$defs/x` still resolve;
    so are their `x-guidance`. Raises ApiError if two tools define a name differently.
    """
    merged: dict[str, JsonObject] = {"x-guidance": {}}
    calls, ignored = [], set()
    for index, tool in enumerate(tools):
        parameters, dropped = _parameters(request, index, tool)
        ignored.update(dropped)
        for key in ("$defs", "definitions", "x-guidance"):
            values = parameters.pop(key, None)
            if isinstance(values, dict):
                _merge(merged.setdefault(key, {}), values, f"{_tool_field(request, index)}.{key}")
        properties = {"name": {"const": tool.function.name}, "parameters": parameters}
        call = {"type": "object", "properties": properties, "required": ["name", "parameters"]}
        calls.append({**call, "additionalProperties": False})
    merged["x-guidance"] = _ON_ONE_LINE | merged["x-guidance"]
    bound = {"maxItems": 1} if single else {}
    schema = {"type": "array", "minItems": 1, **bound, "items": {"anyOf": calls}, **merged}
    return schema_guide("tools", schema, sorted(ignored))


def _merge(merged: JsonObject, values: JsonObject, field: str) -> None:
    for name, value in values.items():
        if merged.setdefault(name, value) != value:
            message = f"{field}.{name} is another one than an earlier tool's; it must be the same in every tool"
            raise ApiError(400, message, field, "invalid_value")


def _tool_field(request: ChatRequest, index: int) -> str:
    """Return the field of a tool's schema, with the tool's number."""
    return request.client_field("tools.function.parameters").replace("tools", f"tools[{index}]", 1)


def _parameters(request: ChatRequest, index: int, tool: Tool) -> tuple[JsonObject, list[str]]:
    """Return the schema of a tool's arguments, and the names of its keywords without effect. Raises ApiError."""
    schema = tool.function.parameters or {"type": "object", "properties": {}}
    if tool.function.strict:
        return strict_schema(schema, _tool_field(request, index)), []
    return lenient_schema(schema, request.client_field("tools.function.parameters"))


def _options(schema: JsonObject) -> JsonObject:
    options = schema.get("x-guidance")
    return options if isinstance(options, dict) else {}
