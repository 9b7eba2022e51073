"""A conversation as the model's prompt: its messages rendered by the checkpoint's chat template, as transformers does.

Templates come from the operator or the checkpoint; jinja's sandbox keeps them from Python's internals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

from jinja2 import TemplateError, meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triton_llama_openai.errors import ApiError
from triton_llama_openai.output.tool_calls import CLOSE, OPEN
from triton_llama_openai.prompt.special_tokens import RenderedPrompt, SpecialTokenGuard
from triton_llama_openai.protocol.chat import (
    AssistantMessage,
    Message,
    TemplateFields,
    ToolMessage,
    parse_arguments,
    text_of,
)
from triton_llama_openai.protocol.schema import JsonObject

_RENDERING_ERRORS = (
    *(TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    RecursionError,
)
"""Exceptions of a template for messages that it doesn't support."""

_END = "END_OF_THE_LAST_MESSAGE"
"""Marks where a message that is continued ends; the template may trim the blanks before it."""

_SYSTEM = "THE_SYSTEM_MESSAGE"
"""Marks where a system message stands; the template's own default one stands there, too."""

TOOLS_AS_TEXT = """You may call functions. These are their signatures, one JSON object a line:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and its arguments:
<tool_call>
{{"name": "<name>", "arguments": {{<arguments>}}}}
</tool_call>"""
"""Hermes' form in the system message, for templates that have no place for tools."""


class InvalidTemplateError(Exception):
    """A template can't be compiled."""


class ChatTemplate:
    """One compiled template. special_tokens: variables such as bos_token. takes_tools: it reads `tools`.

    reserved: variables that `chat_template_kwargs` can't set. id_length: of a tool call's id, None for any.

    Raises:
        InvalidTemplateError: the source isn't a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            variables = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidTemplateError(f"can't be compiled: {_first_line(error)}") from error
        self.source = source
        self.takes_tools = "tools" in variables
        # Mistral's templates refuse other ids. Like vLLM, take their ends.
        self.id_length = 9 if "length != 9" in source else None
        self.reserved = {"messages", "tools", "add_generation_prompt", *special_tokens, *environment.globals}
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        turns: Sequence[JsonObject],
        tools: Sequence[JsonObject] | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
        field: str = "messages",
    ) -> str:
        """Return the prompt. variables: more of the template's own, from the request. field: of the messages there.

        Raises:
            ApiError: the template refuses these messages, or has a fault that they bring out.
        """
        try:
            return self._template.render(
                {
                    **self._special_tokens,
                    **(variables or {}),
                    "messages": list(turns),
                    "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _RENDERING_ERRORS as error:
            message = f"{field} can't be rendered: the chat template says: {_first_line(error)}"
            raise ApiError(400, message, field, "invalid_value") from error

    def turn_text(self) -> str:
        """Return the prompt of a short conversation, an empty text if the template refuses it."""
        turns: list[JsonObject] = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
        for conversation in (turns, turns[1:]):
            try:
                return self.render(conversation, add_generation_prompt=False)
            except ApiError:
                continue
        return ""

    def default_system_message(self, variables: Mapping[str, object]) -> str:
        """Return the system message that the template writes for a conversation without one, an empty text if none."""
        user: JsonObject = {"role": "user", "content": "user"}
        try:
            default = self.render([user], variables=variables)
            marked = self.render([{"role": "system", "content": _SYSTEM}, user], variables=variables)
        except ApiError:
            return ""
        before, _, after = marked.partition(_SYSTEM)
        size = len(default) - len(before) - len(after)
        has_one = size > 0 and default.startswith(before) and default.endswith(after)
        return default[len(before) :][:size] if has_one else ""

    def render_open(
        self, turns: Sequence[JsonObject], tools: Sequence[JsonObject], variables: Mapping[str, object]
    ) -> str:
        """Return the prompt that ends with the last message's content, for the model to continue it.

        Raises:
            ApiError: as `render`, and for a template that doesn't show the last message.
        """
        last = {**turns[-1], "content": f"{turns[-1]['content']}{_END}"}
        prompt = self.render([*turns[:-1], last], tools, add_generation_prompt=False, variables=variables)
        end = prompt.rfind(_END)
        if end < 0:
            message = "continue_final_message is true; it must be false: the template doesn't show the last message"
            raise ApiError(400, message, "continue_final_message", "invalid_value")
        return prompt[:end]


def render_messages(
    template: ChatTemplate | None,
    messages: Sequence[Message],
    tools: Sequence[JsonObject],
    request: TemplateFields,
    *,
    defaults: JsonObject | None = None,
    documents: Sequence[JsonObject] | None = None,
    field: str = "messages",
    guard: SpecialTokenGuard | None,
) -> RenderedPrompt:
    """Return the prompt of a conversation. defaults: variables that the request may override. field: of the messages.

    guard: None allows clients to write special tokens.

    Raises:
        ApiError: the checkpoint has no template, or it refuses the messages.
    """
    if template is None:
        raise ApiError(400, "the checkpoint has no chat template: use /v1/completions", None, "no_chat_template")
    variables = {**(defaults or {}), **(request.chat_template_kwargs or {})}
    if reserved := sorted(variables.keys() & template.reserved):
        message = f"chat_template_kwargs has {reserved[0]}; it must leave the template's own variables alone"
        raise ApiError(400, message, "chat_template_kwargs", "invalid_value")
    if documents is not None:
        variables["documents"] = documents
    turns = [_turn(message, template.id_length) for message in messages]
    placeholders: dict[str, str] = {}
    if guard is not None:
        (turns, tools, variables), placeholders = guard.hide((turns, tools, variables))
    if not template.takes_tools and (tools or any(turn["role"] == "tool" or "tool_calls" in turn for turn in turns)):
        if tools and turns and turns[0]["role"] != "system" and (default := template.default_system_message(variables)):
            turns.insert(0, {"role": "system", "content": default})
        turns, tools = _tools_as_text(turns, tools), []
    if request.continue_final_message:
        return RenderedPrompt(template.render_open(turns, tools, variables), placeholders)
    begins_answer = request.add_generation_prompt is not False
    text = template.render(turns, tools, add_generation_prompt=begins_answer, variables=variables, field=field)
    return RenderedPrompt(text, placeholders)


def _turn(message: Message, id_length: int | None) -> JsonObject:
    """Return a message as templates read it, a tool call's arguments as an object.

    id_length: of a tool call's id, of which the end is taken.
    """
    ids = slice(None if id_length is None else -id_length, None)
    turn: JsonObject = {
        "role": "system" if message.role == "developer" else message.role,
        "content": text_of(message.content),
    }
    if message.name is not None:
        turn["name"] = message.name
    if isinstance(message, ToolMessage):
        turn["tool_call_id"] = message.tool_call_id[ids]
    if isinstance(message, AssistantMessage):
        reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
        if reasoning is not None:
            turn["reasoning_content"] = reasoning
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                function = {"name": call.function.name, "arguments": parse_arguments(call.function.arguments)}
                calls.append({"id": call.id[ids], "type": "function", "function": function})
            turn["tool_calls"] = calls
    return turn


def _tools_as_text(turns: Sequence[JsonObject], tools: Sequence[JsonObject]) -> list[JsonObject]:
    """Return turns without tools in them: definitions in the system message, calls and results as text.

    Results become a user's turn, joined with their neighbours, for templates in which user and assistant alternate.
    """
    plain: list[JsonObject] = []
    if tools:
        text = TOOLS_AS_TEXT.format(tools="\n".join(_tojson(tool) for tool in tools))
        if turns and turns[0]["role"] == "system":
            text = f"{turns[0]['content']}\n\n{text}"
            turns = turns[1:]
        plain.append({"role": "system", "content": text})
    follows_result = False
    for turn in turns:
        role, content = turn["role"], str(turn["content"])
        calls = turn.get("tool_calls")
        if isinstance(calls, list):
            call_texts = [f"{OPEN}\n{_tojson(call['function'])}\n{CLOSE}" for call in calls]
            content = "\n".join([content, *call_texts] if content else call_texts)
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
            if follows_result:
                content = f"{plain.pop()['content']}\n{content}"
        follows_result = turn["role"] == "tool"
        plain.append({"role": role, "content": content})
    return plain


class _GenerationBlock(Extension):
    """transformers' block `{% generation %}`, which marks assistant tokens for a training mask: renders its body."""

    tags = {"generation"}  # noqa: RUF012  jinja's declaration

    def parse(self, parser: Parser) -> Node:
        """Return the block's nodes."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return str(caller())


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
