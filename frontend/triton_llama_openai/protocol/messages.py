"""The messages of a conversation, and the tools that a model may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Protocol

from pydantic import Field, Tag
from pydantic_core import from_json

from triton_llama_openai.errors import ApiError
from triton_llama_openai.protocol.schema import (
    IGNORED,
    CacheHint,
    Items,
    JsonObject,
    Schema,
    Unsupported,
    one_of,
    refused,
)

TemplateKwargs = Annotated[JsonObject, Field(max_length=64)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(Schema):
    """A part of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str
    cache_control: CacheHint = None
    prompt_cache_breakpoint: CacheHint = None


Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[Items[TextPart], Tag("<list>")],
    one_of("a string or a list of text parts"),
]


class HasText(Protocol):
    """A part of a content, on any path."""

    @property
    def text(self) -> str:
        """The part's text."""


def text_of(content: str | Sequence[HasText] | None) -> str:
    """Return a content as one text; parts are joined with line ends, as vLLM does."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class SystemMessage(Schema):
    """Instructions; the role developer is system for the chat template."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None
    cache_control: CacheHint = None


class UserMessage(Schema):
    """A user's message."""

    role: Literal["user"]
    content: Content
    name: str | None = None
    cache_control: CacheHint = None


def parse_arguments(text: str) -> JsonObject | None:
    """Return a call's arguments as the object that templates expect, None for any other text."""
    try:
        # Unlike json's, it refuses lone surrogates, which have no bytes, and deep nesting.
        arguments = from_json(text or "{}")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


class CalledFunction(Schema):
    """The function of a tool call; arguments: JSON."""

    name: FunctionName
    arguments: str


class ToolCall(Schema):
    """A call that the model made."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, json_schema_extra=IGNORED)


class AssistantMessage(Schema):
    """An earlier answer of the model, in the form in which this endpoint returns it, so that it can be sent back."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Items[ToolCall] | None = None
    name: str | None = None
    cache_control: CacheHint = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = Field(None, json_schema_extra=IGNORED)
    annotations: Items[JsonObject] | None = Field(None, json_schema_extra=IGNORED)
    audio: Unsupported = None
    function_call: Annotated[object | None, refused("use tool_calls")] = None


class ToolMessage(Schema):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(max_length=256)]
    name: str | None = None
    cache_control: CacheHint = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def check_continuation(continue_final_message: bool | None, add_generation_prompt: bool | None) -> None:
    """Raise ApiError if the last message is to be continued and a new one begun."""
    if continue_final_message and add_generation_prompt:
        message = "continue_final_message and add_generation_prompt are both true; one must be false"
        raise ApiError(400, message, "continue_final_message", "invalid_value")


class FunctionDefinition(Schema):
    """A function that the model may call. parameters: the JSON schema of its arguments.

    Arguments are constrained to the schema only if tool_choice forces a call (`required` or a named function).
    """

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    cache_control: CacheHint = None


class Tool(Schema):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheHint = None


Tools = Annotated[Items[Tool], Field(max_length=128)]


class NamedFunction(Schema):
    """A function's name."""

    name: FunctionName


class NamedToolChoice(Schema):
    """Forces a call of this function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[NamedToolChoice, Tag("<object>")],
    one_of("none, auto, required, or an object that names a function"),
]
