"""Formats of the answer's text: OpenAI's response_format, and vLLM's structured outputs."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, Tag
from pydantic_core import PydanticCustomError

from triton_llama_openai.protocol.schema import Items, JsonObject, Schema, one_of


class TextFormat(Schema):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Schema):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Schema):
    """A schema that the text satisfies. strict: true refuses keywords that can't be enforced; others ignore them."""

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

_BLANK = r"(?:[ \t\n\r]|\\[tnrs])"
# Repetitions begin at 0 or 1: an answer whose gaps must have many blanks would not end.
_OF_BLANKS = re.compile(rf"(?:{_BLANK}|\[{_BLANK}+\]|\((?:\?:)?|[)|?*+]|\{{[01],[0-9]*\}})*")


def _pattern_of_blanks(pattern: str) -> str:
    """Check that a regular expression matches nothing but JSON's whitespace; return it with that for `\\s`."""
    try:
        valid = _OF_BLANKS.fullmatch(pattern) and re.compile(pattern)
    except (re.error, OverflowError):
        valid = None
    if not valid:
        raise PydanticCustomError(
            "whitespace_pattern",
            r"Input should be a regular expression of spaces, tabs and line ends, such as [ \n]? or [ \n]{0,9}",
        )
    # The model's regular expressions have Unicode's whitespace, and classes within classes.
    return pattern.replace(r"\s", r"[ \t\n\r]")


WhitespacePattern = Annotated[str, Field(max_length=64), AfterValidator(_pattern_of_blanks)]
"""The whitespace of a gap between two tokens of JSON."""


class StructuredOutputs(Schema):
    """vLLM's: exactly one of these, and the gaps of the JSON. `json_` is the field json."""

    json_: GuidedJson | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: WhitespacePattern | None = None
