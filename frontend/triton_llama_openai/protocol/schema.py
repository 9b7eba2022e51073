"""What all requests' schemas share: strict types, no unknown fields, marks for ignored and unsupported ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError

MAX_WORDS = 16
MAX_WORD_BYTES = 1024
MAX_TOKEN = 2**31 - 1

IGNORED: JsonDict = {"x-ignored": True}
"""`json_schema_extra` of a field that is checked and has no effect; the answer's header names those that were sent."""


def without_effect(reason: str) -> Any:  # noqa: ANN401 - what pydantic's Field returns
    """Return the field of a name that clients send, which has no effect here."""
    return Field(None, json_schema_extra=IGNORED, description=reason)


MAX_IGNORED = 64
"""Fields without effect that an answer names; hostile bodies have hundreds of thousands."""

_MAX_OBJECTS = 1 << 13
"""Objects of a body that are searched for them: 20 ms."""


class Schema(BaseModel):
    """A part of a request. JSON's types are taken as they are: "1" is no number, 1 is no string.

    Unknown fields are refused, unless `model_validate_json` gets `extra="allow"`; then they have no effect.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def ignored(self) -> list[str]:
        """Return the fields that were sent and have no effect, MAX_IGNORED at most: `user`, `messages.refusal`."""
        names: set[str] = set()
        for prefix, part in islice(self._parts(), _MAX_OBJECTS):
            for name in part._without_effect():
                names.add(prefix + name)
                if len(names) == MAX_IGNORED:
                    return sorted(names)
        return sorted(names)

    def _without_effect(self) -> Iterator[str]:
        """Yield the object's own fields that are marked as ignored or unknown."""
        fields = type(self).model_fields
        for name in self.model_fields_set & fields.keys():
            if fields[name].json_schema_extra == IGNORED and getattr(self, name) is not None:
                yield name
        yield from self.model_extra or ()

    def _parts(self, prefix: str = "") -> Iterator[tuple[str, Schema]]:
        """Yield this object and those in its fields that have an effect, each with its place: `messages.`."""
        yield prefix, self
        fields = type(self).model_fields
        for name in self.model_fields_set & fields.keys():
            if fields[name].json_schema_extra == IGNORED:
                continue
            value = getattr(self, name)
            # A list has objects of schemas alone, or none: there may be millions of tokens.
            listed = value if isinstance(value, list) and value and isinstance(value[0], Schema) else [value]
            for item in listed:
                if isinstance(item, Schema):
                    yield from item._parts(f"{prefix}{name}.")


def refused(reason: str) -> BeforeValidator:
    """Mark a field that clients know and this endpoint refuses; null is accepted, as no value."""

    def check(value: object) -> object:
        if value is not None:
            raise PydanticCustomError("unsupported_parameter", "{reason}", {"reason": reason})
        return value

    return BeforeValidator(check, json_schema_input_type=None)


Unsupported = Annotated[object | None, refused("this endpoint has no such feature")]


def by_json_type(value: object) -> str | None:
    """Return the tag of a union's member: what kind of JSON value it is."""
    match value:
        case str():
            return "<string>"
        case list():
            return "<list>"
        case dict():
            return "<object>"
        case int() | float() if not isinstance(value, bool):
            return "<number>"
    return None


def one_of(expected: str) -> Discriminator:
    """Return the discriminator of a union of members with the tags of `by_json_type`."""
    return Discriminator(
        by_json_type, custom_error_type="union_type", custom_error_message=f"Input should be {expected}"
    )


def _word_size(word: str) -> str:
    if len(word.encode()) > MAX_WORD_BYTES:
        raise PydanticCustomError("too_long", "Input should have at most {limit} bytes", {"limit": MAX_WORD_BYTES})
    return word


T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list, checked up to its first bad item: a hostile body has millions, and pydantic makes an error of each."""

Word = Annotated[str, Field(min_length=1), AfterValidator(_word_size)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN)]
TokenIds = Annotated[Items[TokenId], Field(max_length=1 << 16)]
Words = Annotated[
    Annotated[Word, Tag("<string>")] | Annotated[Items[Word], Field(max_length=MAX_WORDS), Tag("<list>")],
    one_of("a string or a list of strings"),
]
"""One stop string, or a list of them."""

JsonObject = dict[str, object]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
CacheHint = Annotated[JsonObject | None, Field(json_schema_extra=IGNORED)]
"""Anthropic's hint, or OpenAI's; here prefixes are cached without it."""
ModelName = Annotated[str, Field(min_length=1, max_length=256)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=256)]

OnlyTrue = Literal[True] | None
OnlyFalse = Literal[False] | None
"""Both are types of other servers' fields of which this endpoint has one behaviour: the other value is refused."""
