"""The request of /v1/responses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from triton_llama_openai.errors import ApiError, unsupported
from triton_llama_openai.protocol.chat import FunctionDefinition, FunctionName, TemplateKwargs
from triton_llama_openai.protocol.formats import JsonObjectFormat, JsonSchema, TextFormat
from triton_llama_openai.protocol.response_items import InputItem, Item, without_nulls
from triton_llama_openai.protocol.sampling import SamplingFields
from triton_llama_openai.protocol.schema import (
    IGNORED,
    MAX_TOKEN,
    Items,
    JsonObject,
    Metadata,
    Schema,
    Unsupported,
    by_json_type,
    one_of,
    refused,
    without_effect,
)

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_NOT_STORED = "answers are not stored; send the whole conversation as input"
_Short = Annotated[str, Field(max_length=64)]


class FlatJsonSchema(JsonSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class TextOptions(Schema):
    """Options of the answer's text."""

    format: Annotated[TextFormat | JsonObjectFormat | FlatJsonSchema, Field(discriminator="type")] | None = None
    verbosity: _Short | None = Field(None, json_schema_extra=IGNORED)


class FunctionByName(Schema):
    """A function's name: as a choice it forces a call."""

    type: Literal["function"]
    name: FunctionName


class FunctionTool(FunctionDefinition, FunctionByName):
    """A function that the model may call; the only kind of tool."""


FunctionTools = Annotated[Items[Annotated[FunctionTool, BeforeValidator(without_nulls)]], Field(max_length=128)]


class AllowedTools(Schema):
    """Restricts the calls to these tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[FunctionByName], Field(min_length=1, max_length=128)]


def _choice_kind(value: object) -> str | None:
    """Return the tag of a tool choice's form."""
    allowed = isinstance(value, dict) and value.get("type") == "allowed_tools"
    return "<allowed tools>" if allowed else by_json_type(value)


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")]
    | Annotated[FunctionByName, Tag("<object>")]
    | Annotated[AllowedTools, Tag("<allowed tools>")],
    Discriminator(
        _choice_kind,
        custom_error_type="union_type",
        custom_error_message="Input should be none, auto, required, or an object that names functions",
    ),
]


class ReasoningOptions(Schema):
    """Hints to OpenAI's models."""

    effort: _Short | None = None
    summary: _Short | None = None
    generate_summary: _Short | None = None
    context: _Short | None = None
    mode: _Short | None = None


class ResponseStreamOptions(Schema):
    """Options of a stream; it has no obfuscation."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields):
    """A request of /v1/responses."""

    input: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[Items[InputItem], Field(min_length=1), Tag("<list>")],
        one_of("a string or a list of items"),
    ]
    """a text, or items, with `instructions` at most `max_messages`: messages with or without `type` (roles user,
    assistant, system, developer; a content is text, or parts `input_text` and `output_text`), `function_call`,
    `function_call_output` (after its call), `reasoning` (its `content`, for templates that show it)"""
    instructions: str | None = None
    """a system message in front"""
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    """default: what the context leaves"""
    text: TextOptions | None = None
    """`format`: `text`, `json_object`, `json_schema` (`strict`: [schemas](openai.md#tools)); `verbosity` is ignored"""
    tools: FunctionTools | None = None
    """functions; built-in tools are refused by name"""
    tool_choice: ResponseToolChoice | None = None
    """`none`, `auto`, `required`, a function by name, or `allowed_tools`: the others are as if not sent"""
    parallel_tool_calls: bool | None = None
    """false: one call at most"""
    include: Items[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    """`message.output_text.logprobs`: log probabilities; `reasoning.encrypted_content` is ignored"""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """alternatives of each token; above 0 with that `include`"""
    metadata: Metadata | None = None
    """texts that are repeated in the answer"""
    truncation: Literal["auto", "disabled"] | None = None
    """`auto` is ignored: an input that is too long is an error"""
    chat_template_kwargs: TemplateKwargs | None = None
    """as a chat's"""

    reasoning: ReasoningOptions | None = without_effect(
        "a hint for OpenAI's models; `effort` and `summary` are repeated in the answer"
    )
    max_tool_calls: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = without_effect("of built-in tools")
    service_tier: _Short | None = without_effect("OpenAI's bookkeeping")
    safety_identifier: Annotated[str, Field(max_length=512)] | None = without_effect("OpenAI's bookkeeping")
    prompt_cache_retention: _Short | None = without_effect("a hint for OpenAI's cache")
    prompt_cache_options: JsonObject | None = without_effect("a hint for OpenAI's cache")
    stream_options: ResponseStreamOptions | None = without_effect("the stream is not obfuscated")

    store: bool | None = None
    """true is refused: nothing is stored"""
    background: bool | None = None
    """true is refused: an answer ends with its request"""
    previous_response_id: Annotated[object | None, refused(_NOT_STORED)] = None
    conversation: Annotated[object | None, refused(_NOT_STORED)] = None
    prompt: Annotated[object | None, refused("prompts are not stored; send the text as instructions")] = None
    context_management: Unsupported = None
    moderation: Unsupported = None

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if self.store:
            raise unsupported("store", "nothing is stored; send false")
        if self.background:
            raise unsupported("background", "an answer ends with its request; send false")
        if self.top_logprobs and not self.logprobs:
            message = f"top_logprobs is {self.top_logprobs}; it needs include to have {LOGPROBS}"
            raise ApiError(400, message, "top_logprobs", "invalid_value")
        return self

    @property
    def items(self) -> list[Item]:
        """The items of the input; a text has none."""
        return [] if isinstance(self.input, str) else self.input

    @property
    def logprobs(self) -> bool:
        """Whether the answer has log probabilities."""
        return LOGPROBS in (self.include or [])

    def _without_effect(self) -> Iterator[str]:
        yield from super()._without_effect()
        if ENCRYPTED in (self.include or []):
            yield f"include.{ENCRYPTED}"
        if self.truncation == "auto":
            yield "truncation"
