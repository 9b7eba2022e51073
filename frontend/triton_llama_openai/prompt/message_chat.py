"""A request of the Messages API as a chat: its blocks as messages, its fields under a chat's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from triton_llama_openai.errors import invalid
from triton_llama_openai.output.answers import dumps
from triton_llama_openai.prompt.chat_messages import assistant_message, function_call, sampling_fields
from triton_llama_openai.protocol.chat import ChatRequest, text_of
from triton_llama_openai.protocol.message_blocks import (
    AssistantBlock,
    AssistantTurn,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from triton_llama_openai.protocol.messages import CountTokensRequest, MessagesRequest
from triton_llama_openai.protocol.schema import JsonObject

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessageChat(ChatRequest):
    """The chat of a request; errors name the request's fields."""

    CLIENT_FIELDS: ClassVar[Mapping[str, str]] = {
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "response_format.json_schema.schema": "output_config.format.schema",
        "tools.function.parameters": "tools.input_schema",
        "tool_choice.function.name": "tool_choice.name",
    }


def chat_request(body: CountTokensRequest, max_messages: int) -> MessageChat:
    """Return the chat of a request. Raises ApiError."""
    values: JsonObject = {"model": body.model}
    if isinstance(body, MessagesRequest):
        values = {**sampling_fields(body), "max_tokens": body.max_tokens}
    messages = _messages(body)
    if len(messages) > max_messages:
        count = f"{len(messages)} messages with system and each tool_result"
        raise invalid("messages", count, f"at most {max_messages}")
    # As under Anthropic's API, the answer goes on where the last message ends.
    begun = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    values |= {
        "messages": messages,
        "response_format": _response_format(body),
        "continue_final_message": begun,
        "add_generation_prompt": not begun,
        "chat_template_kwargs": _template_kwargs(body),
        **_tools(body),
    }
    # Texts and schemas are taken as they are; only the objects around them are new.
    return MessageChat.model_validate(values)


def _messages(body: CountTokensRequest) -> list[JsonObject]:
    messages: list[JsonObject] = []
    if body.system is not None:
        messages.append({"role": "system", "content": text_of(body.system)})
    call_ids: set[str] = set()
    for index, turn in enumerate(body.messages):
        if isinstance(turn.content, str) or not turn.content:
            messages.append({"role": turn.role, "content": turn.content or ""})
        elif isinstance(turn, AssistantTurn):
            messages += _assistant_message(turn.content, index)
            call_ids |= {block.id for block in turn.content if isinstance(block, ToolUseBlock)}
        elif isinstance(turn, UserTurn):
            messages += _user_messages(turn, index, call_ids)
        else:
            messages.append({"role": turn.role, "content": text_of(turn.content)})
    return messages


def _assistant_message(blocks: Sequence[AssistantBlock], index: int) -> list[JsonObject]:
    calls = [
        function_call(block.id, block.name, dumps(block.input).decode())
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    thinking = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    messages = assistant_message(texts, calls, thinking)
    if not messages:
        types = [block.type for block in blocks]
        raise invalid(f"messages[{index}].content", types, "a list with a text or a tool_use")
    return messages


def _user_messages(turn: UserTurn, index: int, call_ids: set[str]) -> list[JsonObject]:
    """Return a message for each result and one for the texts between two results. call_ids: of the calls before."""
    messages: list[JsonObject] = []
    texts: list[TextBlock] = []

    def end_texts() -> None:
        if texts:
            messages.append({"role": "user", "content": text_of(texts)})
            texts.clear()

    for number, block in enumerate(turn.content):
        if isinstance(block, ToolResultBlock):
            if block.tool_use_id not in call_ids:
                field = f"messages[{index}].content[{number}].tool_use_id"
                raise invalid(field, block.tool_use_id, "the id of a tool_use before it")
            end_texts()
            result = text_of(block.content)
            messages.append({"role": "tool", "content": result, "tool_call_id": block.tool_use_id})
        elif isinstance(block, TextBlock):
            texts.append(block)
    end_texts()
    return messages


def _template_kwargs(body: CountTokensRequest) -> JsonObject | None:
    kwargs = body.chat_template_kwargs or {}
    if body.thinking is None or body.thinking.type == "adaptive":
        return kwargs or None
    return {"enable_thinking": body.thinking.type == "enabled", **kwargs}


def _tools(body: CountTokensRequest) -> JsonObject:
    """Return the tools and the choice; `auto` without tools is no choice."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
                "strict": tool.strict,
            },
        }
        for tool in body.tools or []
    ]
    choice = body.tool_choice
    if choice is None or (choice.type == "auto" and not tools):
        return {"tools": tools}
    named = {"type": "function", "function": {"name": choice.name}}
    return {
        "tools": tools,
        "tool_choice": named if choice.type == "tool" else _CHOICES[choice.type],
        "parallel_tool_calls": False if choice.disable_parallel_tool_use else None,
    }


def _response_format(body: CountTokensRequest) -> JsonObject | None:
    output_format = body.output_format
    if body.output_config is not None and body.output_config.format is not None:
        output_format = body.output_config.format
    if output_format is None:
        return None
    return {"type": "json_schema", "json_schema": {"schema": output_format.schema_}}
