"""Texts under generated JSON schemas, compared with the package jsonschema."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import pytest
from engine.engines import engine_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_engine.engine.engine import Engine
from llama_engine.engine.responses import Completion
from llama_engine.model.loader import LoadedModel
from llama_engine.request.parser import GenerationRequest


@pytest.fixture(scope="module")
def engine(fp32: LoadedModel) -> Iterator[Engine]:
    engine = engine_of(fp32, 1)
    yield engine
    engine.guides.close()


_NAMES = st.text('abcdeé"\\ /', min_size=1, max_size=5)
_LEAVES = st.one_of(
    st.builds(lambda size: {"type": "string", "maxLength": size}, st.integers(0, 6)),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
              st.integers(-1000, 1000), st.integers(0, 500)),
    st.builds(lambda low: {"type": "number", "minimum": low, "exclusiveMaximum": low + 2}, st.integers(-9, 9)),
    st.builds(lambda values: {"enum": values},
              st.lists(st.one_of(st.none(), st.booleans(), st.integers(-99, 99), _NAMES), min_size=1, max_size=3)),
    st.builds(lambda value: {"const": value}, st.one_of(_NAMES, st.integers(-99, 99), st.none())),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["null", "boolean"]},
                     {"type": "string", "pattern": "^[a-c]{1,3}$"}, {"type": "string", "format": "date"}]),
)  # fmt: skip


def _objects(properties: dict[str, object], optional: set[str]) -> dict[str, object]:
    return {
        "type": "object", "properties": properties, "additionalProperties": False,
        "required": [name for name in properties if name not in optional],
    }  # fmt: skip


SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items, low: {"type": "array", "items": items, "minItems": low, "maxItems": low + 1},
                  inner, st.integers(0, 2)),
        st.builds(_objects, st.dictionaries(_NAMES, inner, max_size=3), st.sets(_NAMES, max_size=2)),
        st.builds(lambda schema, other: {"anyOf": [schema, other]}, inner, inner),
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.7, 2.0]))
def test_every_text_that_ends_conforms_to_its_schema(
    engine: Engine, schema: dict[str, object], seed: int, temperature: float
) -> None:
    request = GenerationRequest(
        "", tuple(range(40, 52)), max_tokens=300, temperature=temperature, seed=seed, frequency_penalty=0.5,
        guided_decoding_guide_type="json_schema", guided_decoding_guide=json.dumps(schema),
    )  # fmt: skip
    (result,) = engine.generate([request])
    assert isinstance(result, Completion), result
    if result.finish_reason == "stop":
        jsonschema.validate(json.loads(result.text), schema, format_checker=jsonschema.FormatChecker())
