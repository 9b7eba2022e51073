"""The request of /v1/chat/completions: its messages, the tools that the model may call, its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal, Protocol, Self

from pydantic import AfterValidator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError, from_json

from triton_llama_openai.errors import ApiError
from triton_llama_openai.protocol.sampling import SamplingRequest, check_names
from triton_llama_openai.protocol.schema import (
    IGNORED,
    MAX_TOKEN,
    CacheHint,
    Items,
    JsonObject,
    Metadata,
    OnlyFalse,
    OnlyTrue,
    Schema,
    Unsupported,
    one_of,
    refused,
    without_effect,
)

TemplateKwargs = Annotated[JsonObject, Field(max_length=64)]
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
"""OpenAI's have at most 64 characters, Anthropic's 128."""


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


def _json_object(arguments: str) -> str:
    if parse_arguments(arguments) is None:
        raise PydanticCustomError("value_error", "Input should be a JSON object")
    return arguments


Arguments = Annotated[str, AfterValidator(_json_object)]
"""The arguments of a call: JSON of an object."""


class CalledFunction(Schema):
    """The function of a tool call."""

    name: FunctionName
    arguments: Arguments


class SentToolCall(Schema):
    """A call that the model made, as the client sends it back."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, json_schema_extra=IGNORED)


class AssistantMessage(Schema):
    """An earlier answer of the model, in the form in which this endpoint returns it, so that it can be sent back."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Items[SentToolCall] | None = None
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


class TemplateFields(Schema):
    """The fields that say how the chat template renders a conversation."""

    add_generation_prompt: bool | None = None
    """vLLM's; default: true"""
    continue_final_message: bool | None = None
    """vLLM's; true: the last message is continued"""
    chat_template_kwargs: TemplateKwargs | None = None
    """vLLM's; up to 64 more variables for the template, such as `enable_thinking`; those that it already has
    (`messages`, `tools`, …) are refused by name"""

    @model_validator(mode="after")
    def _check_continuation(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt are both true; one must be false"
            raise ApiError(400, message, "continue_final_message", "invalid_value")
        return self


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


class Prediction(Schema):
    """A text that the answer probably repeats."""

    type: Literal["content"]
    content: Content


class ChatRequest(TemplateFields, SamplingRequest):
    """A request of /v1/chat/completions."""

    INPUT_FIELDS: ClassVar[Mapping[str, str]] = {
        **SamplingRequest.INPUT_FIELDS,
        "text_input": "messages",
        "input_ids": "messages",
        "num_logprobs": "top_logprobs",
        "prediction": "prediction",
    }

    messages: Annotated[Items[Message], Field(min_length=1)]
    """at most `max_messages`; roles system, developer (as system), user, assistant, tool; a content is text or a list
    of text parts, which are joined with line ends"""
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    """newer name of `max_tokens`"""
    logprobs: bool | None = None
    """true: log probabilities of the tokens"""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """alternatives of each token; above 0 with `logprobs`"""
    tools: Tools | None = None
    """functions (docs/openai.md#tools)"""
    tool_choice: ToolChoice | None = None
    """`none`, `auto`, `required`, or a function by name"""
    parallel_tool_calls: bool | None = None
    """false: one call at most"""
    modalities: Items[Literal["text"]] | None = None
    """text is the only one"""
    prediction: Prediction | None = None
    """`content`: a text that the answer probably repeats, such as the file that it edits, or a list of text parts, at
    most 1048576 bytes; it changes the speed and no token"""

    metadata: Metadata | None = without_effect("OpenAI's bookkeeping")
    store: bool | None = without_effect("OpenAI's bookkeeping")
    service_tier: Annotated[str, Field(max_length=64)] | None = without_effect("OpenAI's bookkeeping")
    safety_identifier: Annotated[str, Field(max_length=512)] | None = without_effect("OpenAI's bookkeeping")
    prompt_cache_retention: Annotated[str, Field(max_length=64)] | None = without_effect("a hint for OpenAI's cache")
    prompt_cache_options: JsonObject | None = without_effect("a hint for OpenAI's cache")
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = without_effect("the models have no such setting")
    verbosity: Annotated[str, Field(max_length=64)] | None = without_effect("the models have no such setting")
    separate_reasoning: OnlyTrue = without_effect("vllm-router's; false is refused")
    stream_reasoning: OnlyTrue = without_effect("vllm-router's; false is refused")
    include_reasoning: OnlyTrue = without_effect("vllm-router's; false is refused")

    documents: Items[JsonObject] | None = None
    """vLLM's; for templates that show documents"""

    audio: Unsupported = None
    function_call: Annotated[object | None, refused("use tool_choice")] = None
    functions: Annotated[object | None, refused("use tools")] = None
    moderation: Unsupported = None
    web_search_options: Unsupported = None
    chat_template: Annotated[object | None, refused("a template is code; the server's operator sets it")] = None
    echo: OnlyFalse = None
    """a field of completions"""

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", "top_logprobs", "invalid_value")
        check_names("max_tokens", self.max_tokens, "max_completion_tokens", self.max_completion_tokens)
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """max_completion_tokens, or its old name max_tokens."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives of each generated token; None is no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def predicted_text(self) -> str | None:
        """The text of the prediction; None without one."""
        return None if self.prediction is None else text_of(self.prediction.content)

    def input_fields(self) -> dict[str, str]:
        """Return the field of this request for each input of the model, for the model's errors."""
        max_tokens = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        fields = super().input_fields() | {"max_tokens": max_tokens}
        return {name: self.client_field(field) for name, field in fields.items()}
