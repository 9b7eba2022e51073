"""The messages of a conversation in Anthropic's Messages API, and the blocks of their content."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from triton_llama_openai.errors import shorten
from triton_llama_openai.protocol.chat import FunctionName
from triton_llama_openai.protocol.schema import IGNORED, CacheHint, Items, JsonObject, Schema, Unsupported, one_of

Id = Annotated[str, Field(max_length=256)]


def _of_types(*types: str) -> BeforeValidator:
    """Refuse blocks of other types by name: images, documents, server tools."""

    def check(value: object) -> object:
        if isinstance(value, dict) and "type" in value and value["type"] not in types:
            reason = f"it is a block of type {shorten(value['type'])}; here is only {', '.join(types)}"
            raise PydanticCustomError("unsupported_parameter", "{reason}", {"reason": reason})
        return value

    return BeforeValidator(check)


def _tag(value: object) -> str | None:
    return f"<{value.get('type')}>" if isinstance(value, dict) else None


_BY_TYPE = Discriminator(
    _tag, custom_error_type="missing_type", custom_error_message="Input should be a block with a type"
)


class TextBlock(Schema):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: CacheHint = None
    citations: Unsupported = None
    parsed_output: object | None = Field(None, json_schema_extra=IGNORED)


class ToolUseBlock(Schema):
    """A call that the model made. input: the arguments."""

    type: Literal["tool_use"]
    id: Id
    name: FunctionName
    input: JsonObject
    cache_control: CacheHint = None
    caller: JsonObject | None = Field(None, json_schema_extra=IGNORED)
    toolset_name: Id | None = Field(None, json_schema_extra=IGNORED)


class ThinkingBlock(Schema):
    """The reasoning before an answer, for templates that show it. signature: empty in this endpoint's answers."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, json_schema_extra=IGNORED)


class RedactedThinkingBlock(Schema):
    """Encrypted reasoning of another server."""

    type: Literal["redacted_thinking"]
    data: str | None = Field(None, json_schema_extra=IGNORED)


TextBlocks = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[Items[Annotated[TextBlock, _of_types("text")]], Tag("<list>")],
    one_of("a string or a list of text blocks"),
]


class ToolResultBlock(Schema):
    """The result of a call, which must be in a message before it."""

    type: Literal["tool_result"]
    tool_use_id: Id
    content: TextBlocks | None = None
    cache_control: CacheHint = None
    is_error: bool | None = Field(None, json_schema_extra=IGNORED)
    toolset_name: Id | None = Field(None, json_schema_extra=IGNORED)


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")],
    _BY_TYPE,
    _of_types("text", "tool_result"),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")],
    _BY_TYPE,
    _of_types("text", "tool_use", "thinking", "redacted_thinking"),
]


class SystemTurn(Schema):
    """Instructions."""

    role: Literal["system"]
    content: TextBlocks


class UserTurn(Schema):
    """A user's message, or results of calls."""

    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[Items[UserBlock], Tag("<list>")],
        one_of("a string or a list of blocks"),
    ]


class AssistantTurn(Schema):
    """An earlier answer, in the form in which this endpoint returns it; as the last message, its beginning."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[Items[AssistantBlock], Tag("<list>")],
        one_of("a string or a list of blocks"),
    ]


MessageTurn = Annotated[SystemTurn | UserTurn | AssistantTurn, Field(discriminator="role")]
