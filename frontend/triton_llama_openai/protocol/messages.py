"""The requests of Anthropic's Messages API, /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from triton_llama_openai.errors import ApiError
from triton_llama_openai.protocol.chat import FunctionName, TemplateKwargs
from triton_llama_openai.protocol.message_blocks import MessageTurn, TextBlocks
from triton_llama_openai.protocol.sampling import SamplingFields
from triton_llama_openai.protocol.schema import (
    IGNORED,
    MAX_TOKEN,
    MAX_WORDS,
    CacheHint,
    Items,
    JsonObject,
    ModelName,
    Schema,
    Unsupported,
    Word,
    without_effect,
)

_Short = Annotated[str, Field(max_length=64)]


class MessageTool(Schema):
    """A function that the model may call; the server tools of Anthropic have other types."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: CacheHint = None
    eager_input_streaming: bool | None = Field(None, json_schema_extra=IGNORED)
    defer_loading: bool | None = Field(None, json_schema_extra=IGNORED)
    input_examples: Items[JsonObject] | None = Field(None, json_schema_extra=IGNORED)
    allowed_callers: Items[Literal["direct"]] | None = Field(None, json_schema_extra=IGNORED)


class MessageToolChoice(Schema):
    """Whether the model calls tools. name: of the tool that the type `tool` forces."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            message = f"tool_choice.name is {self.name!r}; it must be a tool's name with the type tool, else missing"
            raise ApiError(400, message, "tool_choice.name", "invalid_value")
        return self


class Thinking(Schema):
    """Whether the model reasons before it answers; `adaptive` leaves it to the chat template."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = Field(None, json_schema_extra=IGNORED)
    display: Literal["summarized", "omitted"] | None = Field(None, json_schema_extra=IGNORED)


class JsonOutputFormat(Schema):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Schema):
    """Options of the answer's text."""

    format: JsonOutputFormat | None = None
    effort: _Short | None = Field(None, json_schema_extra=IGNORED)


class MessageMetadata(Schema):
    """Anthropic's bookkeeping."""

    user_id: Annotated[str, Field(max_length=512)] | None = None


class CountTokensRequest(Schema):
    """A conversation, as both paths take it."""

    model: ModelName | None = None
    """a served name, another one is 404; not needed where there is only one"""
    messages: Annotated[Items[MessageTurn], Field(min_length=1)]
    """roles user, assistant, system; a content is a text or a list of blocks: `text`, of a user `tool_result` (a text
    or text blocks, after its call), of the assistant `tool_use`, `thinking` (for templates that show it) and
    `redacted_thinking` (ignored); an assistant's message as the last one is continued, unless it has a `tool_use`; at
    most `max_messages`, to which `system`, each `tool_result` and the texts between two count"""
    system: TextBlocks | None = None
    """a system message in front, a text or text blocks"""
    tools: Annotated[Items[MessageTool], Field(max_length=128)] | None = None
    """functions; server tools and Anthropic's own are refused by name"""
    tool_choice: MessageToolChoice | None = None
    """`auto`, `any`, `tool` with its `name`, `none`; with `disable_parallel_tool_use` one call at most"""
    thinking: Thinking | None = None
    """`enabled` and `disabled` set the template's `enable_thinking`, where it has that; `adaptive` leaves it as it is;
    `budget_tokens` and `display` are ignored"""
    output_config: OutputConfig | None = None
    """`format`: `json_schema`, as a chat's `response_format`; `effort` is ignored"""
    output_format: JsonOutputFormat | None = None
    """older name of `output_config.format`"""
    chat_template_kwargs: TemplateKwargs | None = None
    """as a chat's"""

    cache_control: JsonObject | None = without_effect("prefixes are cached without it, in blocks, too")
    context_management: JsonObject | None = without_effect("the conversation is taken as it comes")
    speed: _Short | None = without_effect("there is one speed")

    container: Unsupported = None
    mcp_servers: Unsupported = None

    @model_validator(mode="after")
    def _check_formats(self) -> Self:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            message = "output_format and output_config.format are both given; it must be one of them"
            raise ApiError(400, message, "output_format", "invalid_value")
        return self


class MessagesRequest(CountTokensRequest, SamplingFields):
    """A request of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN)]
    """maximum tokens of the answer"""
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    """0 is greedy; default: the checkpoint's, else 1"""
    stop: Annotated[Items[Word], Field(max_length=MAX_WORDS)] | None = Field(None, alias="stop_sequences")
    """stop strings of 1 … 1024 bytes; the text ends before the first of them"""

    metadata: MessageMetadata | None = without_effect("Anthropic's bookkeeping")
    service_tier: _Short | None = without_effect("Anthropic's bookkeeping")
    inference_geo: _Short | None = without_effect("Anthropic's bookkeeping")
    diagnostics: JsonObject | None = without_effect("of Anthropic's cache")
