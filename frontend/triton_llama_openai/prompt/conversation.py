"""A conversation prepared for the engine: its prompt, its tools, its guide, and the parser of its output.

The chat path and the Responses API share it; they differ in how they write requests and answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from triton_llama_openai.errors import ApiError, invalid
from triton_llama_openai.middleware import RequestRecord
from triton_llama_openai.output.output_parser import Markers, OutputParser, is_closed, is_open, is_open_in, tag_format
from triton_llama_openai.output.structured_output import (
    Guide,
    follow,
    guide_fields,
    guide_of,
    lenient_schema,
    schema_guide,
    strict_schema,
)
from triton_llama_openai.output.tool_calls import CallReader, ForcedCalls, Form, HermesReader, LlamaReader
from triton_llama_openai.prompt.chat_template import Turn, render_messages
from triton_llama_openai.prompt.special_tokens import RenderedPrompt
from triton_llama_openai.protocol.chat import ChatRequest, NamedToolChoice, Tool, text_of
from triton_llama_openai.protocol.schema import JsonObject
from triton_llama_openai.settings import Settings
from triton_llama_openai.triton.generation import Generation, truncate
from triton_llama_openai.triton.inputs import Prompt

if TYPE_CHECKING:
    from triton_llama_openai.prompt.tokenizer import Checkpoint
    from triton_llama_openai.routes.served_model import ServedModel

_ON_ONE_LINE: JsonObject = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Calls as json.dumps writes them, which templates show the models; free whitespace is where small models stay."""


@dataclass(frozen=True)
class PreparedChat:
    """A conversation that can be generated.

    prompt: the rendered messages, or the last tokens of them. new_parser: makes the parser of one choice's output.
    """

    prompt: Prompt
    use: ToolUse
    new_parser: Callable[[], OutputParser]
    generation: Generation
    model: ServedModel

    def count_reasoning(self, choices: Iterable[OutputParser]) -> None:
        """Count the tokens of all choices' reasoning in the usage, as the tokenizer splits its text.

        The engine doesn't say which tokens were whose. It takes milliseconds for thousands of tokens.
        """
        usage = self.generation.usage
        tokens = sum(self.model.checkpoint.num_tokens("".join(choice.reasoning)) for choice in choices)
        usage.reasoning_tokens = min(tokens, usage.completion_tokens)


async def prepare_chat(
    chat: ChatRequest, model: ServedModel, settings: Settings, record: RequestRecord
) -> PreparedChat:
    """Prepare the conversation of a request. Raises ApiError."""
    field = chat.client_field("messages")
    if len(chat.messages) > settings.max_messages:
        raise invalid(field, f"{len(chat.messages)} messages", f"at most {settings.max_messages}")
    use = tool_use(chat, model.tool_form)
    # A structural tag's text is free outside of its structures.
    guided = use.guide is not None and use.guide.kind != "structural_tag"
    without_reasoning = guided and not model.reasons_before_guides
    rendered = render_messages(
        model.checkpoint.template(with_tools=bool(use.template_tools)),
        chat.messages,
        use.template_tools,
        add_generation_prompt=chat.add_generation_prompt is not False,
        continue_final_message=bool(chat.continue_final_message),
        template_kwargs=_template_kwargs(chat, without_reasoning=without_reasoning),
        documents=chat.documents,
        field=field,
        guard=model.checkpoint.guard if settings.special_tokens == "text" else None,
    )
    text = record.prompt = rendered.text
    if rendered.placeholders or chat.truncate_prompt_tokens is not None:
        # A long text takes the tokenizer long.
        prompts = await asyncio.to_thread(_prompts, chat, rendered, model.checkpoint)
    else:
        prompts = [text]
    guide = use.guide
    markers = None if without_reasoning else model.markers
    begun = markers is not None and _is_begun(chat, text, markers)
    if markers is not None and guide is not None and guided:
        may_begin = not (chat.continue_final_message or is_closed(markers, text))
        if begun or may_begin:
            guide = follow(tag_format(markers, begun=begun), guide)
    record.ignored += use.ignored
    generation = Generation(chat, prompts, guide, model, settings, record)

    def new_parser() -> OutputParser:
        calls = None if use.call_reader is None else use.call_reader()
        # Other blanks after a marker are the guided text's own.
        return OutputParser(markers or (), calls, begun=begun, blanks="\n" if guided else None)

    if guided and use.call_reader is not None:
        generation.end_with(new_parser)
    return PreparedChat(prompts[0], use, new_parser, generation, model)


def _prompts(chat: ChatRequest, rendered: RenderedPrompt, checkpoint: Checkpoint) -> list[Prompt]:
    return truncate(chat, [checkpoint.prompt_of(rendered)], checkpoint)


def _template_kwargs(chat: ChatRequest, *, without_reasoning: bool) -> JsonObject:
    """Return the request's variables of the template."""
    kwargs = chat.chat_template_kwargs or {}
    return {"enable_thinking": False, **kwargs} if without_reasoning else kwargs


def _is_begun(chat: ChatRequest, prompt: str, markers: Markers) -> bool:
    """Return whether the text begins within reasoning."""
    if chat.continue_final_message:
        return is_open_in(markers, text_of(chat.messages[-1].content))
    return is_open(markers, prompt)


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
        index = names.index(name)
        parameters, dropped = _parameters(request, index, tools[index])
        parameters["x-guidance"] = _ON_ONE_LINE | _options(parameters)
        guide = schema_guide(_tool_field(request, index), parameters, dropped)
        return ToolUse(template_tools, guide, partial(ForcedCalls, name), "stop", ignored)
    guide = _calls_guide(request, tools, single)
    return ToolUse(template_tools, guide, ForcedCalls, ignored=ignored)


def template_tool(tool: Tool) -> Turn:
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
