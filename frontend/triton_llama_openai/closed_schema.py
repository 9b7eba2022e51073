"""JSON schemas whose objects have the properties that the schema names, and no others.

By JSON Schema's rules an object may have any property besides those. A model that is held to such a schema invents
some; no client asked for them. XGrammar, and so vLLM by default, reads schemas this way too.
"""

from __future__ import annotations

from triton_llama_openai.sampling_request import JsonObject

_NAMED = ("properties", "$defs", "definitions")
_LISTED = ("anyOf", "oneOf", "prefixItems")
_OPEN = {"additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties"}
"""Beside `properties`: there may be others, or the schema says itself that there are none."""
_SAME_OBJECT = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas"}
"""Hold more schemas for the same object."""


def close_objects(schema: JsonObject) -> JsonObject:
    """Return the schema with `additionalProperties: false` in each object that names all its properties.

    A schema in which several parts name properties of one object stays as it is: closed, each part would exclude the
    others' properties.
    """
    closed = schema if _combines(schema) else _close(schema)
    assert isinstance(closed, dict)
    return closed


def _combines(value: object) -> bool:
    """Return whether an object may be described in several places."""
    if isinstance(value, list):
        return any(map(_combines, value))
    if not isinstance(value, dict):
        return False
    parts = value.keys() & (_SAME_OBJECT | _OPEN | {"properties", "required"})
    if "allOf" in parts or (len(parts) > 1 and parts & _SAME_OBJECT):
        return True
    return any(map(_combines, value.values()))


def _close(schema: object) -> object:
    if not isinstance(schema, dict):
        return schema
    closed = {key: _close_value(key, value) for key, value in schema.items()}
    if _names_all_properties(closed):
        closed["additionalProperties"] = False
    return closed


def _close_value(key: str, value: object) -> object:
    if key in _NAMED and isinstance(value, dict):
        return {name: _close(part) for name, part in value.items()}
    if key in _LISTED and isinstance(value, list):
        return [_close(part) for part in value]
    return _close(value) if key in ("items", "additionalProperties") else value


def _names_all_properties(schema: JsonObject) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or _OPEN & schema.keys():
        return False
    return all(name in properties for name in required if isinstance(name, str))
