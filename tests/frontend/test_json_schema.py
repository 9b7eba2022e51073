"""Schemas that llguidance can't enforce as they are: what is dropped, what is named, what is refused."""

from __future__ import annotations

import json

import pytest
from frontend.endpoints import Endpoint, Json, check_refusal
from frontend.fake_triton import FakeTriton
from llguidance import LLMatcher
from triton_llama_openai.guides.json_schema import enforceable

HEADER = "x-ignored-parameters"
NAMED: Json = {"type": "function", "function": {"name": "f"}}
TAGS: Json = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
UNIQUE: Json = {"type": "object", "properties": {"a": TAGS}}
KEPT: Json = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string"}}},
    "additionalProperties": False,
}


def tool(name: str, parameters: Json, **fields: object) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def schema_format(schema: Json, **fields: object) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}


def is_accepted(schema: Json) -> bool:
    return not LLMatcher.validate_grammar(f"start: %json {json.dumps(schema)}\n")


@pytest.mark.parametrize(
    "schema",
    [
        *({"type": "string", "format": name} for name in ("password", "int32")),
        {"uniqueItems": False},
        {"propertyNames": {"type": "string"}},
        {"unevaluatedProperties": True},
        {"$schema": "https://example.com/schema"},
    ],
)
def test_a_keyword_that_only_annotates_is_dropped(schema: Json) -> None:
    result, unenforced = enforceable({"type": "object", "properties": {"a": schema}})
    assert not unenforced
    assert is_accepted(result)
    assert not is_accepted(schema)


@pytest.mark.parametrize(
    "schema",
    [
        *({name: {}} for name in ("contains", "not", "dependentSchemas")),
        {"uniqueItems": True},
        {"propertyNames": {"maxLength": 2}},
        {"unevaluatedProperties": False},
        {"minProperties": 1, "properties": {"a": {}}},
        {"patternProperties": {"(?=a)": {}}},
        *({"pattern": text} for text in ("(?=a)b", r"\bfoo", r"(a)\1", "a$b", "a{,3}")),
    ],
)
def test_a_keyword_that_llguidance_refuses_is_found(schema: Json) -> None:
    assert not is_accepted(schema)
    result, unenforced = enforceable({"anyOf": [schema]})
    keyword = next(iter(schema))
    assert unenforced == [f".anyOf[0].{keyword}"]
    assert is_accepted(result)


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"type": "string", "format": "date-time"}, "properties": {"format": {"type": "string"}}},
        {"pattern": r"^[A-Z]{3}-\d{2,}$"},
        {"pattern": r"(?P<a>\w+)@(?:b|c)\.\p{L}"},
        {"pattern": r"[^\]$^(?=]\u{42}\/"},
    ],
)
def test_a_format_or_pattern_that_is_enforced_stays(schema: Json) -> None:
    assert is_accepted(schema)
    assert enforceable(schema) == (schema, [])


def test_without_strict_the_unenforced_is_named(served: Endpoint, triton: FakeTriton) -> None:
    tools = {"tools": [tool("f", UNIQUE)]}
    for fields, name in (
        ({**tools, "tool_choice": "required"}, "tools.function.parameters.uniqueItems"),
        ({**tools, "tool_choice": NAMED}, "tools.function.parameters.uniqueItems"),
        ({"response_format": schema_format(UNIQUE)}, "response_format.json_schema.schema.uniqueItems"),
    ):
        assert served.chat(**fields).headers[HEADER] == name
        assert json.dumps(KEPT)[1:-1] in json.dumps(triton.guide)


def test_a_keyword_that_is_dropped_keeps_no_object_open(served: Endpoint, triton: FakeTriton) -> None:
    schema: Json = {"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False}
    assert served.chat(response_format=schema_format(schema)).status_code == 200
    assert triton.guide["additionalProperties"] is False


def test_with_strict_what_cannot_be_enforced_is_refused_by_its_path(served: Endpoint) -> None:
    tools = [tool("f", KEPT), tool("g", UNIQUE, strict=True)]
    param = "tools[1].function.parameters.properties.a.uniqueItems"
    check_refusal(served.chat(tools=tools, tool_choice="required"), param, "can't be enforced")
    param = "response_format.json_schema.schema.properties.a.uniqueItems"
    check_refusal(served.chat(response_format=schema_format(UNIQUE, strict=True)), param, "can't be enforced")
    flat: Json = {"type": "function", "name": "g", "parameters": UNIQUE, "strict": True}
    param = "tools[0].parameters.properties.a.uniqueItems"
    check_refusal(served.respond(tools=[flat], tool_choice="required"), param, "can't be enforced")
    check_refusal(served.chat(guided_json=UNIQUE), "guided_json.properties.a.uniqueItems", "can't be enforced")


def test_tools_that_are_not_forced_may_have_any_schema(served: Endpoint) -> None:
    response = served.chat(tools=[tool("g", UNIQUE, strict=True)])
    assert response.status_code == 200
    assert HEADER not in response.headers


def test_schemas_of_which_several_may_hold_need_no_strict(served: Endpoint, triton: FakeTriton) -> None:
    schema: Json = {"oneOf": [{"minimum": 1}, {"type": "integer"}]}
    assert not is_accepted(schema)
    assert served.chat(response_format=schema_format(schema)).status_code == 200
    assert is_accepted(triton.guide)


def test_tools_share_one_whitespace_which_is_the_guides(served: Endpoint, triton: FakeTriton) -> None:
    tools = [tool(name, {**KEPT, "x-guidance": {"key_separator": f":{name}"}}) for name in "ab"]
    assert served.chat(tools=tools[:1], tool_choice="required").status_code == 200
    options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ":a"}
    assert triton.guide["x-guidance"] == options
    param = "tools[1].function.parameters.x-guidance"
    check_refusal(served.chat(tools=tools, tool_choice="required"), param, "the same in every tool")
