"""Objects of a schema are closed where that excludes nothing the schema asks for."""

from __future__ import annotations

import pytest
from frontend.endpoints import Endpoint, Json
from frontend.fake_triton import FakeTriton
from triton_llama_openai.structured_output import close_objects, json_guide

OPEN: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED: Json = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (OPEN, CLOSED),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"properties": {"b": OPEN}}, {"properties": {"b": CLOSED}, "additionalProperties": False}),
        ({"$defs": {"A": OPEN}, "$ref": "#/$defs/A"}, {"$defs": {"A": CLOSED}, "$ref": "#/$defs/A"}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"additionalProperties": OPEN}, {"additionalProperties": CLOSED}),
    ],
)
def test_an_object_that_names_its_properties_is_closed_wherever_it_is(schema: Json, closed: Json) -> None:
    assert close_objects(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": {"type": "string"}},
        {**OPEN, "patternProperties": {"^x": {"type": "string"}}},
        {**OPEN, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {**OPEN, "anyOf": [{"properties": {"b": {}}, "required": ["b"]}, {"properties": {"c": {}}}]},
        {**OPEN, "oneOf": [{"properties": {"b": {}}, "required": ["b"]}]},
        {**OPEN, "$defs": {"B": {"properties": {"b": {}}, "required": ["b"]}}, "$ref": "#/$defs/B"},
        {"required": ["a"], "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {"items": {"anyOf": [OPEN], "oneOf": [{"properties": {"b": {}}, "required": ["b"]}]}},
        {"$defs": {"A": OPEN}, "patternProperties": {"b": {"allOf": [{"$ref": "#/$defs/A"}, {"required": ["b"]}]}}},
        {**OPEN, "minProperties": 2},
        {"$defs": {"A": OPEN}, "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}]},
        {"properties": {"a": {"allOf": [OPEN, {"properties": {"b": {}}}]}}},
        {**OPEN, "required": ["a", "b"]},
        {"const": {"properties": {"a": 1}}},
    ],
)
def test_a_schema_that_says_more_stays_as_it_is(schema: Json) -> None:
    assert close_objects(schema) == schema


@pytest.mark.parametrize("text", ["{", "[]", "true", "[" * 100_000])
def test_what_is_no_object_is_the_models_to_refuse(text: str) -> None:
    assert json_guide("guided_json", text).guide == text


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": OPEN},
        {"guided_json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
        {"structured_outputs": {"json": OPEN}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": OPEN}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": OPEN}}},
    ],
)
def test_every_field_with_a_schema_closes_it(served: Endpoint, triton: FakeTriton, fields: Json) -> None:
    assert served.chat(**fields).status_code == 200
    assert '"additionalProperties":false' in str(triton.last.value("guided_decoding_guide"))
