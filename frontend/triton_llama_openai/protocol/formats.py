"""Formats of the answer's text: OpenAI's response_format, and vLLM's structured outputs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag

from triton_llama_openai.protocol.schema import Items, JsonObject, Schema, one_of


class TextFormat(Schema):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Schema):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Schema):
    """A schema that the text satisfies; it is enforced whatever `strict` is."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Schema):
    """JSON of a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class StructuralTagFormat(Schema):
    """vLLM's: free text with structured parts, begun by triggers."""

    type: Literal["structural_tag"]
    structures: Items[JsonObject] | None = None
    triggers: Items[str] | None = None
    format: JsonObject | None = None


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]
GuidedJson = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[JsonObject, Tag("<object>")],
    one_of("a JSON schema, or one as a string"),
]
Choices = Annotated[Items[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024)]


class StructuredOutputs(Schema):
    """vLLM's: exactly one of these. `json_` is the field json."""

    json_: GuidedJson | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
