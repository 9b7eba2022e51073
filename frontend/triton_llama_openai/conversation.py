"""A request's messages as the turns of a chat template, and the prompt that it makes of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic_core import from_json

from triton_llama_openai.chat_request import AssistantMessage, ChatRequest, Message, ToolMessage, text_of
from triton_llama_openai.chat_template import RESERVED, ChatTemplate, Turn
from triton_llama_openai.errors import ApiError, invalid
from triton_llama_openai.sampling_request import JsonObject

TOOLS_AS_TEXT = """You may call functions. These are their signatures, one JSON object a line:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and its arguments:
<tool_call>
{{"name": "<name>", "arguments": {{<arguments>}}}}
</tool_call>"""
"""Hermes' form in the system message, for templates that have no place for tools."""


def check_messages(messages: Sequence[Message], most: int) -> None:
    """Raise ApiError if a conversation has more messages than the bound."""
    if len(messages) > most:
        raise invalid("messages", f"{len(messages)} messages", f"at most {most}")


def chat_prompt(request: ChatRequest, template: ChatTemplate | None, tools: Sequence[Turn]) -> str:
    """Return the prompt of a conversation.

    Raises:
        ApiError: the checkpoint has no template, or it refuses the messages.
    """
    continued = bool(request.continue_final_message)
    if continued and request.add_generation_prompt:
        message = "continue_final_message and add_generation_prompt are both true; one must be false"
        raise ApiError(400, message, "continue_final_message", "invalid_value")
    more: JsonObject = dict(request.chat_template_kwargs or {})
    if request.documents is not None:
        more["documents"] = request.documents
    return render(
        template,
        request.messages,
        tools,
        add_generation_prompt=request.add_generation_prompt is not False,
        continued=continued,
        variables=more,
    )


def render(
    template: ChatTemplate | None,
    messages: Sequence[Message],
    tools: Sequence[Turn],
    *,
    add_generation_prompt: bool,
    continued: bool = False,
    variables: JsonObject | None = None,
) -> str:
    """Return the prompt of messages; `continued`: it ends within the last one."""
    if template is None:
        raise ApiError(400, "the checkpoint has no chat template: use /v1/completions", None, "no_chat_template")
    variables = variables or {}
    if reserved := sorted(variables.keys() & (RESERVED - {"documents"})):
        message = f"chat_template_kwargs has {reserved[0]}; it must leave the template's own variables alone"
        raise ApiError(400, message, "chat_template_kwargs", "invalid_value")
    turns = [_turn(message, index) for index, message in enumerate(messages)]
    shown: Sequence[Turn] = tools
    if not template.takes_tools and (tools or any(_about_tools(turn) for turn in turns)):
        turns, shown = tools_as_text(turns, tools), []
    if continued:
        return template.render_open(turns, shown, variables)
    return template.render(turns, shown, add_generation_prompt=add_generation_prompt, variables=variables)


def _turn(message: Message, index: int) -> Turn:
    """Return a message as templates read it."""
    turn: Turn = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message.content),
    }
    if message.name is not None:
        turn["name"] = message.name
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        if message.reasoning_content is not None:
            turn["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(
                            call.function.arguments, f"messages[{index}].tool_calls[{number}].function.arguments"
                        ),
                    },
                }
                for number, call in enumerate(message.tool_calls)
            ]
    return turn


def _arguments(written: str, field: str) -> JsonObject:
    """Return a call's arguments as the object that templates expect."""
    try:
        # Unlike json's, it refuses lone surrogates, which have no bytes, and deep nesting.
        arguments = from_json(written or "{}")
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{field} is {written[:80]!r}; it must be a JSON object", field, "invalid_value")
    return arguments


def _about_tools(turn: Turn) -> bool:
    return turn["role"] == "tool" or "tool_calls" in turn


def tools_as_text(turns: Sequence[Turn], tools: Sequence[Turn]) -> list[Turn]:
    """Return turns without tools in them: definitions in the system message, calls and results as text.

    Results become a user's turn, joined with their neighbours, for templates in which user and assistant alternate.
    """
    plain: list[Turn] = []
    if tools:
        text = TOOLS_AS_TEXT.format(tools="\n".join(_dumps(tool) for tool in tools))
        if turns and turns[0]["role"] == "system":
            text = f"{turns[0]['content']}\n\n{text}"
            turns = turns[1:]
        plain.append({"role": "system", "content": text})
    for turn in turns:
        role, content = turn["role"], str(turn["content"])
        calls = turn.get("tool_calls")
        if isinstance(calls, list):
            written = [f"<tool_call>\n{_dumps(call['function'])}\n</tool_call>" for call in calls]
            content = "\n".join([content, *written] if content else written)
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if plain and plain[-1].get("results"):
                plain[-1]["content"] = f"{plain[-1]['content']}\n{content}"
                continue
            plain.append({"role": role, "content": content, "results": True})
            continue
        plain.append({"role": role, "content": content})
    return [{key: value for key, value in turn.items() if key != "results"} for turn in plain]


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
