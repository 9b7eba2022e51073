"""A response's request as a chat's: its items as messages, its fields under a chat's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from triton_llama_openai.errors import ApiError, invalid
from triton_llama_openai.prompt.chat_messages import assistant_message, function_call, sampling_fields
from triton_llama_openai.protocol.chat import ChatRequest, text_of
from triton_llama_openai.protocol.response_items import FunctionCallItem, Item, MessageItem, ReasoningItem
from triton_llama_openai.protocol.responses import AllowedTools, FlatJsonSchema, FunctionByName, ResponsesRequest
from triton_llama_openai.protocol.schema import JsonObject, Schema


class ResponseChat(ChatRequest):
    """The chat of a response; errors name the response's fields."""

    CLIENT_FIELDS: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
        "response_format.json_schema.schema": "text.format.schema",
        "tools.function.parameters": "tools.parameters",
        "tool_choice.function.name": "tool_choice.name",
    }


def chat_request(body: ResponsesRequest, max_items: int) -> ResponseChat:
    """Return the chat of a request. Raises ApiError."""
    count = len(body.items) + (body.instructions is not None)
    if count > max_items:
        with_instructions = " with instructions" if body.instructions is not None else ""
        raise invalid("input", f"{count} items{with_instructions}", f"at most {max_items}")
    values: JsonObject = {
        **sampling_fields(body),
        "messages": _messages(body),
        "max_tokens": body.max_output_tokens,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs if body.logprobs else None,
        "response_format": _response_format(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
        **_tools(body),
    }
    # Texts and schemas are taken as they are; only the objects around them are new.
    return ResponseChat.model_validate(values)


def _messages(body: ResponsesRequest) -> list[JsonObject]:
    """Return the messages of the input; consecutive items of the assistant are one, as templates expect."""
    messages: list[JsonObject] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    turn: list[Item] = []
    call_ids: set[str] = set()
    for index, item in enumerate(body.items):
        if isinstance(item, FunctionCallItem | ReasoningItem) or (
            isinstance(item, MessageItem) and item.role == "assistant"
        ):
            turn.append(item)
            continue
        messages += _assistant_message(turn)
        call_ids |= {earlier.call_id for earlier in turn if isinstance(earlier, FunctionCallItem)}
        turn = []
        if isinstance(item, MessageItem):
            messages.append({"role": item.role, "content": text_of(item.content)})
        elif item.call_id in call_ids:
            messages.append({"role": "tool", "content": text_of(item.output), "tool_call_id": item.call_id})
        else:
            raise invalid(f"input[{index}].call_id", item.call_id, "the call_id of a function_call before it")
    messages += _assistant_message(turn)
    if not messages:
        raise invalid("input", "reasoning alone", "at least one message")
    return messages


def _assistant_message(turn: Sequence[Item]) -> list[JsonObject]:
    texts = [text_of(item.content) for item in turn if isinstance(item, MessageItem)]
    calls = [
        function_call(item.call_id, item.name, item.arguments) for item in turn if isinstance(item, FunctionCallItem)
    ]
    reasoning = [part.text for item in turn if isinstance(item, ReasoningItem) for part in item.content or []]
    return assistant_message(texts, calls, reasoning)


def _tools(body: ResponsesRequest) -> JsonObject:
    """Return the tools and the choice; `auto` without tools is no choice."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, AllowedTools):
        if not tools:
            raise ApiError(400, "tool_choice is given without tools", "tool_choice", "invalid_value")
        known = [tool.name for tool in tools]
        for index, allowed in enumerate(choice.tools):
            if allowed.name not in known:
                raise invalid(f"tool_choice.tools[{index}].name", allowed.name, f"one of the tools: {', '.join(known)}")
        names = {allowed.name for allowed in choice.tools}
        tools, choice = [tool for tool in tools if tool.name in names], choice.mode
    chat_tools = [{"type": "function", "function": _without_type(tool)} for tool in tools]
    if isinstance(choice, FunctionByName):
        return {"tools": chat_tools, "tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return {"tools": chat_tools, "tool_choice": choice if tools or choice == "required" else None}


def _response_format(body: ResponsesRequest) -> object:
    text_format = body.text.format if body.text is not None else None
    if not isinstance(text_format, FlatJsonSchema):
        return text_format
    definition = _without_type(text_format)
    definition["schema"] = definition.pop("schema_")
    return {"type": "json_schema", "json_schema": definition}


def _without_type(flat: Schema) -> JsonObject:
    """Return the fields that a chat has in an object of their own."""
    return {name: value for name, value in vars(flat).items() if name != "type"}
