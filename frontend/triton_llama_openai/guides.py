"""What structures a text: response_format, vLLM's guided_* fields and forced tool calls, as the model's guide."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic_core import from_json

from triton_llama_openai.closed_schema import close_objects
from triton_llama_openai.errors import ApiError
from triton_llama_openai.sampling_request import (
    JsonObject,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingRequest,
    StructuralTagFormat,
    StructuredOutputs,
)


@dataclass(frozen=True)
class Guide:
    """The model's inputs `guided_decoding_guide_type` and `guided_decoding_guide`, which must come together.

    field: the request's, for errors. guide: the model ignores the one of the kind `json`.
    """

    field: str
    kind: str
    guide: str = "{}"


def guide_of(request: SamplingRequest) -> Guide | None:
    """Return a request's guide, None for free text. Raises ApiError if the request has two."""
    found = [guide for guide in (_response_format(request), *_vllm_fields(request)) if guide is not None]
    if len(found) > 1:
        names = f"{found[0].field} and {found[1].field}"
        raise ApiError(400, f"{names} are both given; it must be one of them", found[1].field, "invalid_value")
    return found[0] if found else None


def json_guide(field: str, schema: JsonObject | str) -> Guide:
    """Return the guide of a JSON schema, its objects closed."""
    if isinstance(schema, str):
        try:
            parsed = from_json(schema)
        except ValueError:
            # The model says what is wrong with it.
            return Guide(field, "json_schema", schema)
        if not isinstance(parsed, dict):
            return Guide(field, "json_schema", schema)
        schema = parsed
    return Guide(field, "json_schema", _dumps(close_objects(schema)))


def _response_format(request: SamplingRequest) -> Guide | None:
    match request.response_format:
        case JsonObjectFormat():
            return Guide("response_format", "json")
        case JsonSchemaFormat(json_schema=asked):
            if asked.schema_ is None:
                return Guide("response_format", "json")
            return json_guide("response_format", asked.schema_)
        case StructuralTagFormat() as tags:
            given = {name: value for name, value in vars(tags).items() if value is not None}
            return Guide("response_format", "structural_tag", _dumps(given))
    return None


def _vllm_fields(request: SamplingRequest) -> list[Guide | None]:
    return [
        None if request.guided_json is None else json_guide("guided_json", request.guided_json),
        None if request.guided_regex is None else Guide("guided_regex", "regex", request.guided_regex),
        None if request.guided_choice is None else _choice("guided_choice", request.guided_choice),
        None if request.guided_grammar is None else Guide("guided_grammar", "ebnf_grammar", request.guided_grammar),
        None if request.structured_outputs is None else _structured(request.structured_outputs),
    ]


def _structured(outputs: StructuredOutputs) -> Guide | None:
    field = "structured_outputs"
    found = [
        None if outputs.json_ is None else json_guide(field, outputs.json_),
        None if outputs.regex is None else Guide(field, "regex", outputs.regex),
        None if outputs.choice is None else _choice(field, outputs.choice),
        None if outputs.grammar is None else Guide(field, "ebnf_grammar", outputs.grammar),
        Guide(field, "json") if outputs.json_object else None,
        None if outputs.structural_tag is None else Guide(field, "structural_tag", outputs.structural_tag),
    ]
    given = [guide for guide in found if guide is not None]
    if len(given) != 1:
        bound = "exactly one of json, regex, choice, grammar, json_object, structural_tag"
        raise ApiError(400, f"{field} has {len(given)} of its fields; it must have {bound}", field, "invalid_value")
    return given[0]


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
