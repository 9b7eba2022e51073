"""Structured output: response_format and vLLM's guided_* fields, as the model's guide."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic_core import from_json

from triton_llama_openai.errors import ApiError
from triton_llama_openai.guides.json_schema import close_objects, enforceable
from triton_llama_openai.protocol.formats import (
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    StructuredOutputs,
)
from triton_llama_openai.protocol.sampling import SamplingRequest
from triton_llama_openai.protocol.schema import JsonObject


@dataclass(frozen=True)
class Guide:
    """The model's inputs `guided_decoding_guide_type` and `guided_decoding_guide`, which must come together.

    field: the request's, for errors. guide: the model ignores the one of the kind `json`. ignored: keywords of its
    schema without effect.
    """

    field: str
    kind: str
    guide: str = "{}"
    ignored: tuple[str, ...] = ()


def guide_of(request: SamplingRequest) -> Guide | None:
    """Return a request's guide with its whitespace pattern, None for free text.

    Raises ApiError for two guides or patterns, one that can't be enforced, and a pattern without a guide in JSON.
    """
    guide, pattern = _guide(request), _whitespace_pattern(request)
    return guide if pattern is None else _with_whitespace(guide, *pattern)


def guide_fields(request: SamplingRequest) -> list[str]:
    """Return the fields of a request's guide and of its whitespace pattern. Raises ApiError for two of either."""
    guide, pattern = _guide(request), _whitespace_pattern(request)
    return ([] if guide is None else [guide.field]) + ([] if pattern is None else [pattern[0]])


def _guide(request: SamplingRequest) -> Guide | None:
    guides = [guide for guide in (_response_format(request), *_vllm_fields(request)) if guide is not None]
    if len(guides) > 1:
        raise _both_given(guides[0].field, guides[1].field)
    return guides[0] if guides else None


def _whitespace_pattern(request: SamplingRequest) -> tuple[str, str] | None:
    """Return the field of a request's whitespace pattern, and the pattern."""
    outputs = request.structured_outputs
    patterns = {
        "guided_whitespace_pattern": request.guided_whitespace_pattern,
        "structured_outputs.whitespace_pattern": None if outputs is None else outputs.whitespace_pattern,
    }
    given = [(field, pattern) for field, pattern in patterns.items() if pattern is not None]
    if len(given) > 1:
        raise _both_given(*patterns)
    return given[0] if given else None


def _both_given(first: str, second: str) -> ApiError:
    return ApiError(400, f"{first} and {second} are both given; it must be one of them", second, "invalid_value")


def _with_whitespace(guide: Guide | None, field: str, pattern: str) -> Guide:
    """Return the guide with this pattern, the value of `field`, of the gaps in its JSON."""
    if guide is None or guide.kind not in ("json", "json_schema"):
        message = f"{field} needs a JSON guide, such as structured_outputs with json or json_object"
        raise ApiError(400, message, field, "invalid_value")
    schema = {"type": "object"} if guide.kind == "json" else _parsed(guide.guide)
    options = {} if schema is None else schema.get("x-guidance", {})
    if schema is None or not isinstance(options, dict):
        # The model says what is wrong with it.
        return guide
    schema = {**schema, "x-guidance": {**options, "whitespace_pattern": pattern}}
    return replace(guide, kind="json_schema", guide=_dumps(schema))


def json_guide(field: str, schema: JsonObject | str, path: str | None = None) -> Guide:
    """Return the guide of a JSON schema, as `strict_schema`. path: the schema's in the request, if not `field`."""
    parsed = _parsed(schema) if isinstance(schema, str) else schema
    if parsed is None:
        # The model says what is wrong with it.
        return Guide(field, "json_schema", str(schema))
    return schema_guide(field, strict_schema(parsed, path or field))


def schema_guide(field: str, schema: JsonObject, ignored: Sequence[str] = ()) -> Guide:
    """Return the guide of a JSON schema as it is."""
    return Guide(field, "json_schema", _dumps(schema), tuple(ignored))


def strict_schema(schema: JsonObject, path: str) -> JsonObject:
    """Return a schema with its objects closed. Raises ApiError, with the keyword's path, if it can't be enforced."""
    result, unenforced = enforceable(close_objects(schema))
    if unenforced:
        param = path + unenforced[0]
        raise ApiError(400, f"{param} can't be enforced; leave it out", param, "unsupported_parameter")
    return result


def lenient_schema(schema: JsonObject, field: str) -> tuple[JsonObject, list[str]]:
    """Return a schema with its objects closed, without what can't be enforced, and the names of those keywords.

    Schemas of a `oneOf` of which several may hold are taken as `anyOf`. field: the schema's, for the names.
    """
    # A keyword that is dropped no longer keeps its object open.
    remaining, unenforced = enforceable(schema)
    result = close_objects(remaining)
    options = result.get("x-guidance", {})
    if isinstance(options, dict) and '"oneOf":' in _dumps(result):
        result["x-guidance"] = {"coerce_one_of": True, **options}
    return result, sorted({f"{field}.{dropped.rpartition('.')[2]}" for dropped in unenforced})


def follow(prefix: JsonObject, guide: Guide) -> Guide:
    """Return a structural tag: `prefix`, one of its formats, then `guide`."""
    if not guide.guide:
        # The model says that it is empty.
        return guide
    match guide.kind:
        case "regex":
            rest: JsonObject = {"type": "regex", "pattern": guide.guide}
        case "ebnf_grammar":
            rest = {"type": "grammar", "grammar": guide.guide}
        case _:
            schema = {"type": "object"} if guide.kind == "json" else _parsed(guide.guide)
            if schema is None:
                # The model says what is wrong with it.
                return guide
            rest = {"type": "json_schema", "json_schema": schema}
    sequence = {"type": "sequence", "elements": [prefix, rest]}
    return replace(guide, kind="structural_tag", guide=_dumps({"type": "structural_tag", "format": sequence}))


def _parsed(schema: str) -> JsonObject | None:
    """Return a schema from its JSON, with {} for true; None if it is no object."""
    try:
        parsed = from_json(schema)
    except ValueError:
        return None
    if parsed is True:
        return {}
    return parsed if isinstance(parsed, dict) else None


def _response_format(request: SamplingRequest) -> Guide | None:
    field = request.client_field("response_format")
    match request.response_format:
        case JsonObjectFormat():
            return Guide(field, "json")
        case JsonSchemaFormat(json_schema=definition):
            if definition.schema_ is None:
                return Guide(field, "json")
            path = request.client_field("response_format.json_schema.schema")
            if definition.strict:
                return json_guide(field, definition.schema_, path)
            return schema_guide(field, *lenient_schema(definition.schema_, path))
        case StructuralTagFormat() as tags:
            fields = {name: value for name, value in vars(tags).items() if value is not None}
            return Guide(field, "structural_tag", _dumps(fields))
    return None


def _vllm_fields(request: SamplingRequest) -> list[Guide | None]:
    return [
        None if request.guided_json is None else json_guide("guided_json", request.guided_json),
        None if request.guided_regex is None else Guide("guided_regex", "regex", request.guided_regex),
        None if request.guided_choice is None else _choice("guided_choice", request.guided_choice),
        None if request.guided_grammar is None else Guide("guided_grammar", "ebnf_grammar", request.guided_grammar),
        None if request.structured_outputs is None else _structured_outputs(request.structured_outputs),
    ]


def _structured_outputs(outputs: StructuredOutputs) -> Guide:
    field = "structured_outputs"
    candidates = [
        None if outputs.json_ is None else json_guide(field, outputs.json_, f"{field}.json"),
        None if outputs.regex is None else Guide(field, "regex", outputs.regex),
        None if outputs.choice is None else _choice(field, outputs.choice),
        None if outputs.grammar is None else Guide(field, "ebnf_grammar", outputs.grammar),
        Guide(field, "json") if outputs.json_object else None,
        None if outputs.structural_tag is None else Guide(field, "structural_tag", outputs.structural_tag),
    ]
    guides = [guide for guide in candidates if guide is not None]
    if len(guides) != 1:
        bound = "exactly one of json, regex, choice, grammar, json_object, structural_tag"
        raise ApiError(400, f"{field} has {len(guides)} of its fields; it must have {bound}", field, "invalid_value")
    return guides[0]


def _choice(field: str, choices: Sequence[str]) -> Guide:
    """Return a grammar of these texts."""
    texts = [f'"{_EBNF_ESCAPED.sub(_ebnf_escape, choice)}"' for choice in choices]
    return Guide(field, "ebnf_grammar", f"root ::= {' | '.join(texts)}")


_EBNF_ESCAPED = re.compile(r'["\\\x00-\x1f]')


def _ebnf_escape(match: re.Match[str]) -> str:
    character = match[0]
    return f"\\{character}" if character in '"\\' else f"\\x{ord(character):02x}"


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
