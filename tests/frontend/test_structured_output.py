"""Objects of a schema are closed where that excludes nothing the schema asks for."""

from __future__ import annotations

import json

import pytest
from frontend.endpoints import Endpoint, Json, error_of
from frontend.fake_triton import FakeTriton
from frontend.test_json_schema import schema_format
from triton_llama_openai.guides.json_schema import close_objects

OPEN: Json = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED: Json = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (OPEN, CLOSED),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"patternProperties": {"a": OPEN}}, {"patternProperties": {"a": CLOSED}}),
        (
            {"definitions": {"Sub": OPEN}, "allOf": [{"$ref": "#/definitions/Sub"}], "title": "t"},
            {"definitions": {"Sub": CLOSED}, "allOf": [{"$ref": "#/definitions/Sub"}], "title": "t"},
        ),
    ],
)
def test_an_object_that_names_its_properties_is_closed_wherever_it_is(schema: Json, closed: Json) -> None:
    assert close_objects(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**OPEN, "additionalProperties": True},
        {**OPEN, "patternProperties": {"^x": {"type": "string"}}},
        {**OPEN, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {**OPEN, "$defs": {"B": {"properties": {"b": {}}, "required": ["b"]}}, "$ref": "#/$defs/B"},
        {"required": ["a"], "anyOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {**OPEN, "minProperties": 2},
        {"$defs": {"A": OPEN}, "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"b": {}}}]},
        {**OPEN, "required": ["a", "b"]},
        {"const": {"properties": {"a": 1}}},
    ],
)
def test_a_schema_that_says_more_stays_as_it_is(schema: Json) -> None:
    assert close_objects(schema) == schema


@pytest.mark.parametrize(
    ("fields", "schema"),
    [
        ({"guided_json": json.dumps(OPEN)}, CLOSED),
        ({"guided_json": "true"}, {}),
        ({"response_format": schema_format(OPEN)}, CLOSED),
        ({"structured_outputs": {"json_object": True}}, {"type": "object"}),
    ],
)
def test_a_whitespace_pattern_is_in_the_guide(served: Endpoint, triton: FakeTriton, fields: Json, schema: Json) -> None:
    assert served.chat(**fields, guided_whitespace_pattern=r"[ \n]?").status_code == 200
    guide = triton.guide
    assert guide == {**schema, "x-guidance": {"whitespace_pattern": r"[ \n]?"}}
    assert triton.last.value("guided_decoding_guide_type") == "json_schema"


OPTIONS: Json = {"whitespace_pattern": " ", "key_separator": ": "}
GUIDED: Json = {**OPEN, "x-guidance": OPTIONS}
# JSON has four blanks.
BLANKS = [r"\s{1,3}|[\s]", r"[ \t\n\r]{1,3}|[[ \t\n\r]]"]


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"structured_outputs": {"json": OPEN, "whitespace_pattern": ""}}, {"whitespace_pattern": ""}),
        ({"guided_json": GUIDED}, OPTIONS),
        ({"guided_json": GUIDED, "guided_whitespace_pattern": BLANKS[0]}, OPTIONS | {"whitespace_pattern": BLANKS[1]}),
    ],
    ids=["structured_outputs", "the schema's own", "overridden"],
)
def test_a_guides_options_reach_the_model(served: Endpoint, triton: FakeTriton, fields: Json, options: Json) -> None:
    assert served.chat(**fields).status_code == 200
    assert triton.guide["x-guidance"] == options


@pytest.mark.parametrize("guide", ["{", "[]", "false", "[" * 100_000, '{"x-guidance":1}'])
def test_a_malformed_schema_is_the_models_to_refuse(served: Endpoint, triton: FakeTriton, guide: str) -> None:
    assert served.chat(guided_json=guide, guided_whitespace_pattern=" ").status_code == 200
    assert triton.last.value("guided_decoding_guide") == guide


@pytest.mark.parametrize("pattern", ["(", "a", "[^ ]", r"\\s", "(?= )", " {8}", " {0,99999999999}", " " * 65, 1])
def test_a_whitespace_pattern_of_anything_else_is_refused_by_name(served: Endpoint, pattern: object) -> None:
    error = error_of(served.chat(guided_json=OPEN, guided_whitespace_pattern=pattern))
    assert error["param"] == "guided_whitespace_pattern"
    assert "it must" in str(error["message"])
    error = error_of(served.chat(structured_outputs={"json": OPEN, "whitespace_pattern": pattern}))
    assert error["param"] == "structured_outputs.whitespace_pattern"
