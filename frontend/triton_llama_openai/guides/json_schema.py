"""JSON schemas as guides: objects are closed, and without the keywords that the model's grammars can't enforce.

A closed object has the properties that its schema names, and no others. By JSON Schema's rules it may have any others;
a model that is held to such a schema invents some. XGrammar, and so vLLM by default, closes objects, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from triton_llama_openai.protocol.schema import JsonObject

_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Hold schemas by name."""
_HOLDERS = ("items", "additionalProperties", "additionalItems", "anyOf", "oneOf", "allOf", "prefixItems")
"""Hold a schema, or a list of them."""


def _with_subschemas(schema: JsonObject, change: Callable[[object, str], object]) -> JsonObject:
    """Return the schema with its subschemas changed. change: gets a subschema, and its path in the schema."""
    changed: JsonObject = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            changed[key] = {name: change(part, f".{key}.{name}") for name, part in value.items()}
        elif key in _HOLDERS and isinstance(value, list):
            changed[key] = [change(part, f".{key}[{index}]") for index, part in enumerate(value)]
        else:
            changed[key] = change(value, f".{key}") if key in _HOLDERS else value
    return changed


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
    all_of = value.get("allOf")
    if isinstance(all_of, list) and len(all_of) > 1:
        return True
    if len(parts) > 1 and parts & _SAME_OBJECT:
        return True
    return any(map(_combines, value.values()))


def _close(schema: object, path: str = "") -> object:
    if not isinstance(schema, dict):
        return schema
    closed = _with_subschemas(schema, _close)
    if _names_all_properties(closed):
        closed["additionalProperties"] = False
    return closed


def _names_all_properties(schema: JsonObject) -> bool:
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or _OPEN & schema.keys():
        return False
    return all(name in properties for name in required if isinstance(name, str))


_FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
"""Formats that llguidance enforces; it refuses others, which JSON Schema has as annotations."""
_UNENFORCED = {
    *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems"),
    *("propertyNames", "unevaluatedProperties", "dependencies", "dependentRequired", "dependentSchemas"),
    *("not", "if", "then", "else", "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef"),
}
"""Keywords that llguidance refuses; those that it doesn't know it ignores."""
_WITHOUT_EFFECT: dict[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "propertyNames": (True, {}, {"type": "string"}),
}
"""Values of unenforced keywords that every JSON satisfies."""
_ESCAPE = r"\\(?:[dDwWsSpPxuUntrfvaAz]|[^0-9A-Za-z<>])"
_PATTERN_PARTS = [
    _ESCAPE,
    rf"\[\^?\]?(?:{_ESCAPE}|\[:|[^\]\\[])*\]",  # a class
    r"\((?!\?)|\(\?(?:P?<(?![=!])|[a-zA-Z-]*[:)])",  # a group's beginning, or flags
    r"\{[0-9]+(?:,[0-9]*)?\}|\{(?<=\\[pPxu]\{)",
    r"(?:^|(?<=[(|^:]))\^|\$(?=[)|$]|$)",
    r"[^\\\[({^$]",
]
_ENFORCED_PATTERN = re.compile(f"(?:{'|'.join(_PATTERN_PARTS)})*+", re.DOTALL)
"""A pattern without what llguidance's regular expressions don't have: look-around, word boundaries, references to
groups, anchors in the middle, and escapes and braces of other dialects."""


def enforceable(schema: JsonObject) -> tuple[JsonObject, list[str]]:
    """Return the schema without what llguidance can't enforce, and the paths of the keywords without effect in it.

    A path is `.properties.a.uniqueItems`.
    """
    dropped: list[str] = []

    def kept(part: object, path: str) -> object:
        if not isinstance(part, dict):
            return part
        remaining = {}
        for key, value in part.items():
            if _annotates(key, value):
                continue
            if _is_enforced(key, value, part):
                remaining[key] = value
            else:
                dropped.append(f"{path}.{key}")
        return _with_subschemas(remaining, lambda inner, inner_path: kept(inner, path + inner_path))

    result = kept(schema, "")
    assert isinstance(result, dict)
    return result, dropped


def _annotates(key: str, value: object) -> bool:
    """Return whether a keyword with this value constrains nothing, where llguidance would refuse it."""
    if key == "format":
        return value not in _FORMATS if isinstance(value, str) else False
    if key == "$schema":
        return isinstance(value, str) and "//json-schema.org/" not in value
    return value in _WITHOUT_EFFECT.get(key, ())


def _is_enforced(key: str, value: object, schema: JsonObject) -> bool:
    if key == "pattern" and isinstance(value, str):
        return _is_enforced_pattern(value)
    if key == "patternProperties" and isinstance(value, dict):
        return all(map(_is_enforced_pattern, value))
    if key in ("minProperties", "maxProperties"):
        # llguidance counts properties only where those with names are all required.
        properties, required = schema.get("properties"), schema.get("required")
        optional = set(properties if isinstance(properties, dict) else ())
        return not optional.difference(required if isinstance(required, list) else ())
    return key not in _UNENFORCED


def _is_enforced_pattern(pattern: str) -> bool:
    return _ENFORCED_PATTERN.fullmatch(pattern) is not None
