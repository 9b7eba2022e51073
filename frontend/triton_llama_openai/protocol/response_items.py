"""The items of a response's input: messages, calls and their results, reasoning."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, Tag
from pydantic_core import PydanticCustomError

from triton_llama_openai.protocol.chat import Arguments, FunctionName
from triton_llama_openai.protocol.schema import IGNORED, CacheHint, Items, JsonObject, Schema, one_of

Id = Annotated[str, Field(max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


def without_nulls(value: object) -> object:
    """Return an object without its own null fields, another value as it is.

    Libraries dump every field that OpenAI's servers may send.
    """
    return {name: field for name, field in value.items() if field is not None} if isinstance(value, dict) else value


def _with_type(value: object) -> object:
    """Return an item without null fields, one with a role and no type as a message. Refuses an item_reference."""
    item = without_nulls(value)
    if not isinstance(item, dict):
        return item
    if item.get("type") == "item_reference":
        reason = "it is an item_reference, and nothing is stored; send items whole (clients' option store: false)"
        raise PydanticCustomError("unsupported_parameter", "{reason}", {"reason": reason})
    return {"type": "message", **item} if "role" in item else item


class ItemPart(Schema):
    """A part of a message or of a call's result; text is the only kind."""

    type: Literal["input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: CacheHint = None
    annotations: Items[JsonObject] | None = Field(None, json_schema_extra=IGNORED)
    logprobs: Items[JsonObject] | None = Field(None, json_schema_extra=IGNORED)
    parsed: object | None = Field(None, json_schema_extra=IGNORED)


ItemContent = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[Items[ItemPart], Tag("<list>")],
    one_of("a string or a list of text parts"),
]


class MessageItem(Schema):
    """A message; those of the assistant are earlier answers."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    id: Id | None = Field(None, json_schema_extra=IGNORED)
    status: Status | None = Field(None, json_schema_extra=IGNORED)
    phase: Annotated[str, Field(max_length=64)] | None = Field(None, json_schema_extra=IGNORED)


class FunctionCallItem(Schema):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: Id
    name: FunctionName
    arguments: Arguments
    parsed_arguments: object | None = Field(None, json_schema_extra=IGNORED)
    id: Id | None = Field(None, json_schema_extra=IGNORED)
    status: Status | None = Field(None, json_schema_extra=IGNORED)


class FunctionCallOutputItem(Schema):
    """The result of a call, which must be before it."""

    type: Literal["function_call_output"]
    call_id: Id
    output: ItemContent
    id: Id | None = Field(None, json_schema_extra=IGNORED)
    status: Status | None = Field(None, json_schema_extra=IGNORED)


class ReasoningPart(Schema):
    """A text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Schema):
    """The reasoning before an answer, for templates that show it."""

    type: Literal["reasoning"]
    content: Items[ReasoningPart] | None = None
    id: Id | None = Field(None, json_schema_extra=IGNORED)
    status: Status | None = Field(None, json_schema_extra=IGNORED)
    summary: Items[JsonObject] | None = Field(None, json_schema_extra=IGNORED)
    encrypted_content: str | None = Field(None, json_schema_extra=IGNORED)


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
InputItem = Annotated[Annotated[Item, Field(discriminator="type")], BeforeValidator(_with_type)]
