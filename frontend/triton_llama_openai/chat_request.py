"""A request of /v1/chat/completions: messages, tools, and OpenAI's fields that only chats have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, Tag

from triton_llama_openai.sampling_request import JsonObject, SamplingRequest
from triton_llama_openai.schema import IGNORED, MAX_TOKEN, Items, OnlyFalse, Schema, Unsupported, one_of, unsupported

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(Schema):
    """A part of a message's content; text is the only kind."""

    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[Items[TextPart], Tag("<list>")],
    one_of("a string or a list of text parts"),
]


def text_of(content: str | list[TextPart] | None) -> str:
    """Return a content as one text; parts are joined with line ends, as vLLM does."""
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class SystemMessage(Schema):
    """Instructions; the role developer is system for the chat template."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Schema):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


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
    """What the model said, in the form in which this endpoint answers, so that an answer can be sent back as it is."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Items[ToolCall] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = Field(None, json_schema_extra=IGNORED)
    annotations: Items[JsonObject] | None = Field(None, json_schema_extra=IGNORED)
    audio: Unsupported = None
    function_call: Annotated[object | None, unsupported("use tool_calls")] = None


class ToolMessage(Schema):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(max_length=256)]
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(Schema):
    """A function that the model may call. parameters: a JSON schema; it is enforced where the call is."""

    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(Schema):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[Items[Tool], Field(max_length=128)]


class NamedFunction(Schema):
    """A function's name."""

    name: FunctionName


class NamedToolChoice(Schema):
    """The model has to call this function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")] | Annotated[NamedToolChoice, Tag("<object>")],
    one_of("none, auto, required, or an object that names a function"),
]
_NOT_REASONING = "the models of this endpoint have no such setting"


class ChatRequest(SamplingRequest):
    """A request of /v1/chat/completions."""

    ENGINE_FIELDS: ClassVar[Mapping[str, str]] = {
        **SamplingRequest.ENGINE_FIELDS,
        "text_input": "messages",
        "num_logprobs": "top_logprobs",
    }

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    modalities: Items[Literal["text"]] | None = None

    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = Field(None, json_schema_extra=IGNORED)
    store: bool | None = Field(None, json_schema_extra=IGNORED)
    service_tier: Annotated[str, Field(max_length=64)] | None = Field(None, json_schema_extra=IGNORED)
    safety_identifier: Annotated[str, Field(max_length=512)] | None = Field(None, json_schema_extra=IGNORED)
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = Field(None, json_schema_extra=IGNORED)
    prompt_cache_retention: Annotated[str, Field(max_length=64)] | None = Field(None, json_schema_extra=IGNORED)
    prompt_cache_options: JsonObject | None = Field(None, json_schema_extra=IGNORED)

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    documents: Items[JsonObject] | None = None

    audio: Unsupported = None
    function_call: Annotated[object | None, unsupported("use tool_choice")] = None
    functions: Annotated[object | None, unsupported("use tools")] = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    reasoning_effort: Annotated[object | None, unsupported(_NOT_REASONING)] = None
    verbosity: Annotated[object | None, unsupported(_NOT_REASONING)] = None
    web_search_options: Unsupported = None
    chat_template: Annotated[object | None, unsupported("a template is code; the server's operator sets it")] = None
    echo: OnlyFalse = None

    @property
    def asked_max_tokens(self) -> int | None:
        """max_completion_tokens, or its old name max_tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def ignored(self) -> list[str]:
        """Return the fields that were sent and have no effect, those of messages included."""
        nested = {f"messages.{name}" for message in self.messages for name in message.ignored()}
        return super().ignored() + sorted(nested)
